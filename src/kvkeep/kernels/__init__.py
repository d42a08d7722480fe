"""Tensor routines that have a fast version for some devices, each beside its plain torch twin."""
