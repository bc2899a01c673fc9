"""Lets the tests of this folder import what several of them share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests say `from kernel_cases import Case`
