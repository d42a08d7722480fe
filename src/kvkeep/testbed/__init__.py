"""The built-in tiny reasoner: a task family, a model that solves it, and the recipe that trained it."""
