"""Where entries live: append, compact, count. Policies are unknown here."""

from kvkeep.cache.dense import DenseStore

__all__ = ["DenseStore"]
