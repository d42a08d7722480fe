"""Where the benchmark files are, for tests that read them; they are not part of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark files (../shared/data) are not here")
