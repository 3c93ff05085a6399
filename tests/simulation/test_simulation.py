"""Days on the simulated box hold: some for each change, thousands in `make soak`. A failure names its seed."""

import hashlib
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_runtime
from tests.clock import finished
from tests.soak import add

DAYS, SOAK_DAYS = 8, 2000


def seed_of_the_code() -> int:
    files = sorted(Path(gpu_runtime.__file__).parent.rglob("*.py"))
    code = b"".join(file.read_bytes() for file in files)
    return int.from_bytes(hashlib.sha256(code).digest()[:3], "big")


@pytest.mark.processes
@pytest.mark.parametrize(
    "days",
    [
        pytest.param(DAYS, marks=pytest.mark.timeout(900)),
        pytest.param(SOAK_DAYS, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
    ],
    ids=["some", "thousands"],
)
def test_days_hold(days):
    """In a process of its own, because the simulation replaces all locks and clocks of a process.

    The same code has the same days wherever it is tested. The soak searches in new ones.
    """
    seed = seed_of_the_code() if days == DAYS else secrets.randbelow(1_000_000)
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--seeds", str(days)]
    command += ["--branches"] if days == SOAK_DAYS else []
    done = subprocess.run(command, capture_output=True, text=True)  # no limit: the clock is its own
    assert done.returncode == 0, f"from seed {seed}:\n{done.stdout}\n{done.stderr[-3000:]}"
    add("keeper", simulated_days=days)
    print(f"from seed {seed}:\n{done.stdout}")


@pytest.mark.processes
def test_a_seed_is_the_same_day_again():
    day = [sys.executable, "-m", "tests.simulation", "--seed", "33", "--trace"]
    assert finished(day).stdout == finished(day).stdout
