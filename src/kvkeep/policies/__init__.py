"""One published method a file; each is found by its name (see kvkeep.core.registry)."""
