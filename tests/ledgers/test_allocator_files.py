"""The files with allocator maps: which users may read them, and which maps count."""

from __future__ import annotations

import os

import pytest

from gpu_runtime.facts import AllocatorMap
from gpu_runtime.ledgers.allocator_files import MOST_BYTES


def allocator_map(ledger, wall: float = 1.0) -> AllocatorMap:
    return AllocatorMap(ledger.owner.id, "sim:0", wall, 1, 2)


@pytest.fixture
def pair(new_owner_here):
    """Two ledgers, and the file with the maps of the second ledger's owner."""
    a, b = new_owner_here(), new_owner_here()
    b.publish_maps((allocator_map(b),))
    return a, b, b.directory / "owners" / f"{b.owner.id}.map"


def test_a_map_is_private_to_its_user(pair):
    """A map shows how a user uses the memory, so other users must not read it."""
    _, _, file = pair
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_an_unchanged_map_is_not_read_again(pair, monkeypatch):
    """A console shows up to two hundred maps every second, so it reads a map again only if its file
    has changed.
    """
    a, b, _ = pair
    first = a.maps()
    monkeypatch.setattr("gpu_runtime.ledgers.allocator_files._decode", pytest.fail)
    assert a.maps() == first
    monkeypatch.undo()
    b.publish_maps((allocator_map(b, wall=2.0),))
    assert a.maps()[b.owner.id][0].wall == 2.0


@pytest.mark.parametrize(
    "words", [b"", b"{", b'[{"owner":1}]', b"\xff\xfe", b" " * (MOST_BYTES + 1)]
)
def test_a_file_that_is_no_map_is_ignored(pair, words):
    """A file that is incomplete, of another version or damaged is ignored. The maps of other owners
    are still read.
    """
    a, b, file = pair
    a.publish_maps((allocator_map(a),))
    file.write_bytes(words)
    assert a.maps() == {a.owner.id: (allocator_map(a),)}


def test_a_pipe_in_place_of_a_map_blocks_nobody(pair):
    a, _, file = pair
    file.unlink()
    os.mkfifo(file)
    assert a.maps() == {}


def test_a_map_counts_for_its_own_owner_only(pair):
    """If an owner's file contains a map of another owner, this map is ignored."""
    a, b, _ = pair
    a.publish_maps((allocator_map(b, wall=3.0), allocator_map(a)))
    assert b.maps() == {a.owner.id: (allocator_map(a),), b.owner.id: (allocator_map(b),)}


def test_maps_of_dead_owners_are_not_shown_and_are_removed(new_owner_here, notebook):
    """A killed owner cannot remove its files.

    Its lock proves its death, and the next new owner removes them.
    """
    ledger, other = new_owner_here(), notebook()
    other.run("ledger.publish_maps((AllocatorMap(ledger.owner.id, 'sim:0', 1.0, 1, 2),))")
    file = ledger.directory / "owners" / f"{other.id}.map"
    assert list(ledger.maps()) == [other.id] and file.exists()
    other.kill()
    assert ledger.maps() == {} and file.exists()
    new_owner_here()
    assert not file.exists()
