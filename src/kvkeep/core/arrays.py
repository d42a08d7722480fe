"""Types of the host arrays that bookkeeping is done in."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Whole numbers: lengths, page ids, indices.
IntArray: TypeAlias = NDArray[np.integer[Any]]

#: Masks.
BoolArray: TypeAlias = NDArray[np.bool_]

#: Measured quantities.
FloatArray: TypeAlias = NDArray[np.floating[Any]]
