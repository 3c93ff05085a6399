"""The files with answers to `who`: which users may read them, and how large they become."""

from __future__ import annotations

import pytest

from gpu_runtime.facts import Holder, Holdings
from gpu_runtime.ledgers.answer_files import MOST_ASKERS, MOST_BYTES

ANSWER = Holdings((Holder("weights", "variable", "sim:0", 1, 1),))


@pytest.fixture
def pair(new_owner_here):
    return new_owner_here(), new_owner_here()


def files(ledger):
    here = ledger.directory / "owners"
    return here / f"{ledger.owner.id}.told", here / f"{ledger.owner.id}.who"


def test_names_for_its_own_user_are_in_a_file_that_nobody_else_can_read(pair):
    a, b = pair
    private, public = files(a)
    a.publish_answer(b.owner.id, ANSWER, private=True)
    assert private.stat().st_mode & 0o777 == 0o600 and not public.exists()
    a.publish_answer(b.owner.id, Holdings(()), private=False)
    assert b"weights" not in public.read_bytes()


def test_a_file_keeps_the_last_answers_of_a_few_askers(pair):
    a, b = pair
    a.publish_answer(b.owner.id, ANSWER, private=False)
    for number in range(MOST_ASKERS):
        assert b.answer(a.owner.id) == ANSWER
        a.publish_answer(f"{number}.1.0", ANSWER, private=False)
    assert b.answer(a.owner.id) is None


def test_who_asks_again_has_asked_last(pair):
    a, b = pair
    others = map(str, range(MOST_ASKERS - 1))
    for asker in (b.owner.id, *others, b.owner.id, "new"):
        a.publish_answer(asker, ANSWER, private=False)
    assert b.answer(a.owner.id) == ANSWER


@pytest.mark.parametrize("words", [b"", b"{", b'{"x":[1]}', b"\xff", b" " * (MOST_BYTES + 1)])
def test_a_file_that_is_no_answer_is_ignored(pair, words):
    a, b = pair
    a.publish_answer(b.owner.id, ANSWER, private=False)
    files(a)[1].write_bytes(words)
    assert b.answer(a.owner.id) is None


def test_the_files_end_with_their_owner(pair):
    a, b = pair
    a.publish_answer(b.owner.id, ANSWER, private=False)
    a.publish_answer(b.owner.id, ANSWER, private=True)
    a.close()
    assert not any(file.exists() for file in files(a))
