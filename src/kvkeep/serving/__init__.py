"""kvkeep inside vLLM: a plug-in that changes no line of it.

Importing this package imports nothing of vLLM; :func:`kvkeep.serving.plugin.register` is what vLLM calls.
"""
