"""Where entries live: append, compact, count. Nothing here knows a policy or a model."""

from kvkeep.cache.dense import DenseStore
from kvkeep.cache.paged import PagedStore
from kvkeep.cache.pages import PagePool

__all__ = ["DenseStore", "PagePool", "PagedStore"]
