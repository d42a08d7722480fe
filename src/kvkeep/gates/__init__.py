"""Gates: small trained modules that say how long a token will be needed, or which blocks a query reads."""

from kvkeep.gates.block_files import save_blocks
from kvkeep.gates.block_gates import BlockGates, BlockShape
from kvkeep.gates.files import save
from kvkeep.gates.loading import load
from kvkeep.gates.modules import RetentionGates
from kvkeep.gates.shape import GateShape

__all__ = ["BlockGates", "BlockShape", "GateShape", "RetentionGates", "load", "save", "save_blocks"]
