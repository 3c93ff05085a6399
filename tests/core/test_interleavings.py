"""In chosen interleavings of two threads, what must hold of both holds."""

import sys
from pathlib import Path

import pytest

from tests.clock import finished


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("case", ["Collections", "Writes", "UseAndMove"])
def test_two_threads_keep_the_law_in_every_order(case):
    """In a process of its own, because frontrun replaces all locks of a process."""
    pytest.importorskip("frontrun", reason="frontrun is for Linux")
    frontrun = Path(sys.executable).with_name("frontrun")
    done = finished([frontrun, sys.executable, "-m", "tests.interleavings", case])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "interleavings" in done.stdout
