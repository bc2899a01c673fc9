"""Property tests try the same examples in every run, so that a change fails for what it changed.

``HYPOTHESIS_PROFILE=search`` tries new ones: what it finds belongs in an ``@example``.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
