"""Training of gates for a frozen model."""

from kvkeep.training.documents import Document, Documents
from kvkeep.training.loop import Progress, train
from kvkeep.training.recipe import Recipe
from kvkeep.training.session import training
from kvkeep.training.trainer import Trainer

__all__ = ["Document", "Documents", "Progress", "Recipe", "Trainer", "train", "training"]
