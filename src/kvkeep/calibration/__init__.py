"""Statistics of a model that some policies need: capture, save, load, validate."""
