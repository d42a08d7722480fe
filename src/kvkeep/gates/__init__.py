"""Retention gates: small trained modules that say how long each token will be needed."""

from kvkeep.gates.files import load, save
from kvkeep.gates.modules import RetentionGates
from kvkeep.gates.shape import GateShape

__all__ = ["GateShape", "RetentionGates", "load", "save"]
