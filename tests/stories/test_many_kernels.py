"""Sixteen kernels on one book are killed, stopped and restarted: no overgrant, no lost lease, nothing left."""

import os

import pytest

from tests import soak

from .crowd import Warden, crowd
from .kernels import kind

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", 300))  # for each of its seeds


class Killer(Warden):
    """Kills kernels without pause. Half of the kernels kill themselves at a random line of the ledgers' code."""

    with_fuse = 0.5


def note(ledger: str, warden: Warden) -> None:
    soak.add(
        kind(ledger),
        kills=warden.kills,
        kills_at_a_line_of_the_ledgers_code=warden.kills_in_the_ledger,
        stops=warden.stops,
        blocks_served=warden.served,
        looks_of_the_auditor=warden.looks,
    )


def test_many_kernels_share_and_die(keeper, tmp_path):
    def enough(crowd):
        return crowd.kills > 3 and crowd.stops and crowd.served > 15 and crowd.looks > 30

    crowd(keeper, tmp_path, enough, kernels=10, seconds=7, seed=1, calm=0.1)


def test_kernels_that_die_in_the_middle_of_a_write_leave_nothing(ledger, tmp_path):
    def enough(crowd):
        return crowd.kills >= 20 and crowd.kills_in_the_ledger > 1

    crowd(ledger, tmp_path, enough, kernels=6, seconds=0, seed=5, calm=0.05, kind=Killer)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_SECONDS + 600)
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_kernels_share_and_die_for_long(keeper, tmp_path, seed):
    """The crowds differ: a few large kernels, many small ones, slow ones and fast ones."""
    kernels, calm = [(16, 0.04), (8, 0.02), (32, 0.06), (16, 0.3)][seed % 4]

    def enough(crowd):
        return crowd.kills > SOAK_SECONDS

    given = {"kernels": kernels, "seconds": SOAK_SECONDS, "seed": seed, "calm": calm}
    note(keeper, crowd(keeper, tmp_path, enough, **given))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(40, 44))
def test_ten_thousand_kernels_are_killed(ledger, tmp_path, seed):
    """With each seed 2,500 kernels are killed: half of them inside the ledger's code, the others at any time."""

    def enough(crowd):
        return crowd.kills >= 2500 and crowd.served > 100

    given = {"kernels": (8, 12, 16, 6)[seed % 4], "seconds": 0, "most_seconds": 3000}
    note(ledger, crowd(ledger, tmp_path, enough, seed=seed, calm=0.02, kind=Killer, **given))
