"""Pure functions: what is stored in, one score per entry out, larger = keep."""
