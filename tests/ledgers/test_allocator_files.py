"""The maps that lie beside the book as files: who may write them, and whose are believed."""

from __future__ import annotations

import os

import pytest

from gpu_runtime.facts import AllocatorMap
from gpu_runtime.ledgers.allocator_files import MOST_BYTES


def drawn(ledger, wall: float = 1.0) -> AllocatorMap:
    return AllocatorMap(ledger.owner.id, "sim:0", wall, 1, 2)


@pytest.fixture
def pair(here):
    """Two doors, and the file of the second's maps."""
    a, b = here(), here()
    b.publish_maps((drawn(b),))
    return a, b, b.directory / "owners" / f"{b.owner.id}.map"


def test_a_map_is_its_users_alone(pair):
    """It tells how somebody uses their memory."""
    _, _, file = pair
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_a_map_that_has_not_changed_is_not_read_again(pair, monkeypatch):
    """A console looks every second, at up to two hundred of them."""
    a, b, _ = pair
    first = a.maps()
    monkeypatch.setattr("gpu_runtime.ledgers.allocator_files._decode", pytest.fail)
    assert a.maps() == first
    monkeypatch.undo()
    b.publish_maps((drawn(b, wall=2.0),))
    assert a.maps()[b.owner.id][0].wall == 2.0


@pytest.mark.parametrize(
    "words", [b"", b"{", b'[{"owner":1}]', b"\xff\xfe", b" " * (MOST_BYTES + 1)]
)
def test_a_file_that_is_no_map_is_none(pair, words):
    """Cut off, of another version, or somebody's joke: its owner's memory is unknown, and everybody else's is told."""
    a, b, file = pair
    a.publish_maps((drawn(a),))
    file.write_bytes(words)
    assert a.maps() == {a.owner.id: (drawn(a),)}


def test_a_pipe_in_a_maps_place_keeps_nobody_waiting(pair):
    a, _, file = pair
    file.unlink()
    os.mkfifo(file)
    assert a.maps() == {}


def test_nobody_speaks_for_another(pair):
    """A map counts under its owner's name only."""
    a, b, _ = pair
    a.publish_maps((drawn(b, wall=3.0), drawn(a)))
    assert b.maps() == {a.owner.id: (drawn(a),), b.owner.id: (drawn(b),)}


def test_the_maps_of_the_dead_are_not_shown_and_are_swept(here, notebook):
    """Killed, so that nothing was withdrawn: the lock on its file tells, and the next to open a door clears up."""
    ledger, other = here(), notebook()
    other.say("ledger.publish_maps((AllocatorMap(ledger.owner.id, 'sim:0', 1.0, 1, 2),))")
    file = ledger.directory / "owners" / f"{other.id}.map"
    assert list(ledger.maps()) == [other.id] and file.exists()
    other.kill()
    assert ledger.maps() == {} and file.exists()
    here()
    assert not file.exists()
