"""The files or keys of a ledger are deleted, renamed, closed or overwritten at any step of a
transaction.
"""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_runtime.ledgers import book_store
from gpu_runtime.ledgers.sqlite import recovery
from tests import soak
from tests.redis_server import redis_server

from .tearing import (
    DEEDS,
    FILES,
    FILES_OF_REDIS,
    KEYS_OF_REDIS,
    LIMIT,
    STEPS,
    Attack,
    Kernel,
    a_directory,
    as_nobody,
    every_attack,
    held_after,
)


def overcommitted(attacks: list[Attack]) -> list[str]:
    """The attacks on a SQLite ledger after which two kernels hold more than the card has."""
    found = []
    for attack in attacks:
        with a_directory() as root:
            held = held_after(f"sqlite://{root}/ledger", attack)
        if held > LIMIT:
            found.append(f"{attack}: {held} of {LIMIT} GiB")
    return found


@settings(deadline=None)
@given(
    deed=st.sampled_from(DEEDS),
    target=st.sampled_from(FILES),
    step=st.sampled_from(STEPS),
    again=st.booleans(),
    sizes=st.tuples(*[st.integers(1, LIMIT)] * 4),
)
def test_nothing_is_overcommitted_whatever_happens_to_the_files(deed, target, step, again, sizes):
    """Two kernels never hold more than the card has, at whichever step a file is damaged."""
    assert overcommitted([Attack(deed, target, step, again, sizes)]) == []


def test_nothing_is_overcommitted_when_a_file_is_closed_to_its_user():
    """The file's mode is changed. Modes have no effect on root, so the test runs as another user."""
    attacks = [attack for attack in every_attack(FILES, ["chmod"]) if not attack.again]
    assert as_nobody(lambda: overcommitted(attacks)) == []


@pytest.mark.parametrize("target", KEYS_OF_REDIS)
def test_nothing_is_overcommitted_whatever_happens_to_the_keys(target):
    attacks = [attack for attack in every_attack([target]) if attack.step == "decided"]
    assert overcommitted_in_redis(attacks) == []


def overcommitted_in_redis(attacks: list[Attack]) -> list[str]:
    found = []
    with redis_server() as server:
        for attack in attacks:
            with a_directory() as root:
                held = held_after(f"{server.fresh()}&owners={root}", attack)
            if held > LIMIT:
                found.append(f"{attack}: {held} of {LIMIT} GiB")
    return found


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_a_thousand_files_are_torn_away_and_nothing_is_overcommitted(seed):
    attacks = list(every_attack(FILES, seed=seed))
    assert as_nobody(lambda: overcommitted(attacks)) == []
    soak.add("sqlite", torn_files=len(attacks))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_files_and_keys_of_a_redis_are_torn_away(seed):
    attacks = list(every_attack(FILES_OF_REDIS + KEYS_OF_REDIS, seed=seed))
    assert overcommitted_in_redis(attacks) == []
    soak.add("redis", torn_files=len(attacks))


def test_the_test_can_fail(monkeypatch, tmp_path):
    """Without the period of no grants, and without the leases that were last seen, the same bytes
    are granted twice.
    """
    monkeypatch.setattr(recovery, "_missing", lambda *_: {})
    monkeypatch.setattr(book_store, "REGISTER_SECONDS", 0.0)
    first, second = (Kernel(f"sqlite://{tmp_path}/ledger") for _ in range(2))
    second.tick()
    first.take("a", 6)
    shutil.rmtree(first.ledger.directory)
    second.take("b", 6)
    assert first.held == {"a": 6} and second.held == {"b": 6}
    for kernel in (first, second):
        kernel.close()


pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
