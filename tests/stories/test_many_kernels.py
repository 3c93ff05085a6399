"""Sixteen kernels on one book are killed, stopped and restarted: no overgrant, no lost lease, nothing left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import soak
from tests.redis_server import redis_server
from tests.stories.crowd import Report, Warden, crowd

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", 300))  # for each of its seeds


class Killer(Warden):
    """Kills kernels without pause. Half of the kernels kill themselves at a random line of the ledgers' code."""

    with_fuse = 0.5


@pytest.fixture(params=["keeper", "redis"])
def ledger(request, tmp_path) -> Iterator[tuple[str, str]]:
    """The kind of a ledger, and its URL."""
    if request.param == "keeper":
        yield "keeper", f"keeper://{tmp_path}/ledger"
        return
    with redis_server() as server:
        yield "redis", server.fresh()


def run(
    url: str,
    directory: Path,
    *,
    kernels: int,
    seconds: float,
    seed: int,
    calm: float,
    kind: type[Warden] = Warden,
    kills: int = 0,
) -> Report:
    (directory / "slots").mkdir()
    with crowd(
        url, directory / "slots", kernels=kernels, seed=seed, calm=calm, kind=kind
    ) as warden:
        report = warden.run(seconds, kills)
    print(report)
    assert not report.wrong, "\n".join(report.wrong)
    return report


def note(kind: str, report: Report) -> None:
    soak.add(
        kind,
        kills=report.kills,
        kills_at_a_line_of_the_ledgers_code=report.kills_in_the_ledger,
        stops=report.stops,
        blocks_served=report.served,
        looks_of_the_auditor=report.looks,
    )


def test_many_kernels_share_and_die(tmp_path):
    url = f"keeper://{tmp_path}/ledger"
    report = run(url, tmp_path, kernels=10, seconds=7, seed=1, calm=0.1)
    assert report.kills > 3 and report.stops > 0 and report.served > 15 and report.looks > 30


def test_kernels_that_die_in_the_middle_of_a_write_leave_nothing(ledger, tmp_path):
    _, url = ledger
    report = run(url, tmp_path, kernels=6, seconds=30, seed=5, calm=0.05, kind=Killer, kills=20)
    assert report.kills > 10 and report.kills_in_the_ledger > 1


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 600)
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_kernels_share_and_die_for_long(tmp_path, seed):
    """The crowds differ: a few large kernels, many small ones, slow ones and fast ones."""
    kernels, calm = [(16, 0.04), (8, 0.02), (32, 0.06), (16, 0.3)][seed % 4]
    url = f"keeper://{tmp_path}/ledger"
    report = run(url, tmp_path, kernels=kernels, seconds=SOAK_SECONDS, seed=seed, calm=calm)
    note("keeper", report)
    assert report.kills > SOAK_SECONDS


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(40, 44))
def test_ten_thousand_kernels_are_killed(ledger, tmp_path, seed):
    """With each seed 2,500 kernels are killed: half of them inside the ledger's code, the others at any time."""
    kind, url = ledger
    kernels = (8, 12, 16, 6)[seed % 4]
    report = run(
        url, tmp_path, kernels=kernels, seconds=3000, seed=seed, calm=0.02, kind=Killer, kills=2500
    )
    assert report.kills >= 2500 and report.served > 100
    note(kind, report)
