"""Sixteen kernels on one book, while some are killed, stopped and restarted. No grant exceeds the free memory, no
living kernel loses a lease, and nothing is left at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import soak
from tests.stories.crowd import Report, crowd

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", 300))  # for each of its seeds


def run(directory: Path, *, kernels: int, seconds: float, seed: int, calm: float) -> Report:
    (directory / "slots").mkdir()
    with crowd(
        f"sqlite://{directory}/ledger", directory / "slots", kernels=kernels, seed=seed, calm=calm
    ) as warden:
        report = warden.run(seconds)
    print(report)
    assert not report.wrong, "\n".join(report.wrong)
    return report


def test_many_kernels_share_and_die(tmp_path):
    report = run(tmp_path, kernels=16, seconds=12, seed=1, calm=0.1)
    assert report.kills > 5 and report.stops > 1 and report.served > 25 and report.looks > 50


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 600)
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_kernels_share_and_die_for_long(tmp_path, seed):
    """The crowds differ: a few large kernels, many small ones, slow ones and fast ones."""
    kernels, calm = [(16, 0.04), (8, 0.02), (32, 0.06), (16, 0.3)][seed % 4]
    report = run(tmp_path, kernels=kernels, seconds=SOAK_SECONDS, seed=seed, calm=calm)
    soak.add(
        kills=report.kills,
        stops=report.stops,
        blocks_served=report.served,
        looks_of_the_auditor=report.looks,
    )
    assert report.kills > SOAK_SECONDS
