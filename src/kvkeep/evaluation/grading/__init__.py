"""Graders: finding an answer in a text and comparing it, and classes of texts that went wrong."""
