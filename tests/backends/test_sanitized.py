"""The exchange of memory, parks and forks under AddressSanitizer.

gpu-console has no compiled code. It writes into torch's objects and memory with the C library's functions, and lets
torch free what it has exchanged. AddressSanitizer takes the place of these functions and of the allocator, so it sees
each access beyond a block, to a freed block, and each second release.

It is LLVM's. GCC 12's does not hold its own locks during a fork: if another thread allocates then, the child waits for
ever at one of its allocations, as did the workers of a data loader.
"""

import ctypes.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import soak
from tests.clock import scaled

PROGRAMS = {
    "exchange": "backends/test_old_torch.py",
    "swap": "backends/test_swap.py",
    "training": "backends/test_parked_programs.py -k training",
    "programs": "backends/test_parked_programs.py -k random_program --hypothesis-profile=soak",
    "forks": "stories/test_forks.py",
}
EXAMPLES = "200"  # for 20 random programs
PAST_THE_END = """
import torch
from gpu_runtime.backends.pytorch import old_torch
short, long = torch.zeros(10), torch.zeros(100)
old_torch._memmove(short.data_ptr(), long.data_ptr(), long.nbytes)
"""


def reports(place: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Runs Python with these `words` under AddressSanitizer.

    Returns the process, and what AddressSanitizer reports of it and of all processes that it starts.
    """
    library = Path(sys.prefix, "libclang_rt.asan.so")
    # It finds `throw` of C++ only if that library is loaded first too.
    throws = ctypes.util.find_library("stdc++")
    if not library.exists() or throws is None:
        pytest.skip("needs LLVM's AddressSanitizer, on Debian: make .venv/libclang_rt.asan.so")
    settings = {
        "LD_PRELOAD": f"{library} {throws}",
        # no report of leaks: at its end, Python leaves its memory to the system
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={place}/report",
        "PYTHONMALLOC": "malloc",  # else Python's own allocator hides the blocks of its objects
        "SOAK_EXAMPLES": EXAMPLES,
    }
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(3000),
    )
    return done, "".join(path.read_text() for path in place.glob("report.*"))


@pytest.mark.soak
def test_a_write_past_the_end_of_a_tensor_is_seen(tmp_path):
    """So the next test can fail."""
    done, report = reports(tmp_path, "-c", PAST_THE_END)
    assert done.returncode and "heap-buffer-overflow" in report, done.stdout


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("program", PROGRAMS)
def test_parking_exchange_and_forks_touch_no_memory_but_their_own(tmp_path, program):
    command = "-m pytest -q -s -p no:cacheprovider --timeout=3600 tests/" + PROGRAMS[program]
    done, report = reports(tmp_path, *command.split())
    assert done.returncode == 0 and not report, done.stdout[-5000:] + report[:5000]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    soak.add("none", **{"tests under AddressSanitizer": int(passed[1])})
