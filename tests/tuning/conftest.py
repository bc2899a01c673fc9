"""Tests say `from simulated_link import SimulatedLink`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # at the end: another folder's tests say `from conftest import`
