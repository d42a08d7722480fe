"""Measures speed and memory: arms that alternate in one process, on caches filled with synthetic entries."""
