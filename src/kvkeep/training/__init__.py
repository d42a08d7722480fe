"""Training of retention gates for a frozen model."""

from kvkeep.training.documents import Document, Documents
from kvkeep.training.recipe import Recipe
from kvkeep.training.session import training
from kvkeep.training.trainer import Progress, Trainer, train

__all__ = ["Document", "Documents", "Progress", "Recipe", "Trainer", "train", "training"]
