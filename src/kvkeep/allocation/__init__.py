"""Pure functions: scores and equal shares in, a count for every layer and KV head out."""
