"""Tensor routines that may have a GPU version, each beside its plain torch twin."""
