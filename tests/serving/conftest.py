"""Fixtures for the tests of serving."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [
    str(ROOT / folder) for folder in ("kernel_ext", "panels")
]  # the modules of this checkout, installed or not

from tests.owner.conftest import clock, runtime  # noqa: E402, F401
