"""Days on the simulated box hold: a few new ones in each run, thousands in `make soak`. A failure names its seed."""

import secrets
import subprocess
import sys

import pytest

from tests.clock import finished
from tests.soak import add

DAYS, SOAK_DAYS = 8, 2000


@pytest.mark.processes
@pytest.mark.parametrize(
    "days",
    [DAYS, pytest.param(SOAK_DAYS, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
    ids=["some", "thousands"],
)
def test_days_hold(days):
    """In a process of its own, because the simulation replaces all locks and clocks of a process."""
    seed = secrets.randbelow(1_000_000)
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--seeds", str(days)]
    done = subprocess.run(command, capture_output=True, text=True)  # no limit: the clock is its own
    assert done.returncode == 0, f"from seed {seed}:\n{done.stdout}\n{done.stderr[-3000:]}"
    add("keeper", simulated_days=days)
    print(f"from seed {seed}:\n{done.stdout}")


@pytest.mark.processes
def test_a_seed_is_the_same_day_again():
    day = [sys.executable, "-m", "tests.simulation", "--seed", "33", "--trace"]
    assert finished(day).stdout == finished(day).stdout
