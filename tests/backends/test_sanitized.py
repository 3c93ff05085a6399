"""The exchange of memory under AddressSanitizer.

gpu-console has no compiled code. It writes into torch's objects and memory with the C library's functions, and lets
torch free what it has exchanged. AddressSanitizer takes the place of these functions and of the allocator, so it sees
each access beyond a block, to a freed block, and each second release.
"""

import os
import shutil
import subprocess
import sys

import pytest

from tests.clock import scaled

PROGRAMS = ("test_old_torch.py",)
PAST_THE_END = """
import torch
from gpu_runtime.backends.pytorch import old_torch
short, long = torch.zeros(10), torch.zeros(100)
old_torch._memmove(short.data_ptr(), long.data_ptr(), long.nbytes)
"""


def sanitized(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with these `words` under AddressSanitizer."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc, which has AddressSanitizer")
    # It finds `throw` of C++ only if that library is loaded first too.
    places = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    if not all(map(os.path.isabs, places)):
        pytest.skip("gcc has no AddressSanitizer here: install libasan and libstdc++")
    settings = {
        "LD_PRELOAD": " ".join(places),
        "ASAN_OPTIONS": "detect_leaks=0",  # at its end, Python leaves memory to the system
        "PYTHONMALLOC": "malloc",  # else Python's own allocator hides the blocks of its objects
    }
    return subprocess.run(
        [sys.executable, *words],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(3000),
    )


@pytest.mark.soak
def test_a_write_past_the_end_of_a_tensor_is_seen():
    """So the next test can fail."""
    told = sanitized("-c", PAST_THE_END)
    assert told.returncode and "heap-buffer-overflow" in told.stdout, told.stdout


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_parking_and_the_exchange_touch_no_memory_but_their_own(name):
    told = sanitized(
        *f"-m pytest -q -s -p no:cacheprovider tests/backends/{name} --timeout=3600".split()
    )
    assert told.returncode == 0, told.stdout[-5000:]
