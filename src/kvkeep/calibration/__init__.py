"""What a model's heads typically ask: statistics of its queries before rotation (TriAttention)."""

from kvkeep.calibration.capture import capture
from kvkeep.calibration.files import load
from kvkeep.calibration.statistics import LayerStatistics, Provenance, Statistics

__all__ = ["LayerStatistics", "Provenance", "Statistics", "capture", "load"]
