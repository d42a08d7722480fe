"""Pure functions: scores and budget in, counts per layer and KV head out."""
