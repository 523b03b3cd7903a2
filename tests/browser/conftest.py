"""Tests that need a browser are left out, with the reason, where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "report"))  # written_runs
