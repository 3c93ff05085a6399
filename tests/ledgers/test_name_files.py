"""The files with the names of the models that each owner can load. Each name costs one write.

The tests also check which files are ignored.
"""

from __future__ import annotations

import os

import pytest

from gpu_runtime.facts import UNDECLARED, Declared
from gpu_runtime.ledgers import name_files
from gpu_runtime.ledgers.name_files import MOST_BYTES, SPARE_LINES


@pytest.fixture
def pair(new_owner_here):
    """Two ledgers, and the file with the names of the second ledger's owner."""
    a, b = new_owner_here(), new_owner_here()
    b.publish_names({"qwen": UNDECLARED})
    return a, b, b.directory / "owners" / f"{b.owner.id}.names"


def test_names_are_private_to_their_user(pair):
    _, _, file = pair
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_one_more_name_costs_one_line_however_many_there_are(pair):
    """Each name adds one line to the file. When each registration wrote the whole list, the 4,000th
    `register` took 1.1 ms.
    """
    a, b, file = pair
    b.publish_names({f"m{n}": UNDECLARED for n in range(4000)})
    size = file.stat().st_size
    b.add_name("llama")
    assert file.stat().st_size - size == len('+"llama"\n')
    assert len(a.names()[b.owner.id]) == 4001


def test_only_new_lines_are_read(pair, monkeypatch):
    """A console reads the names of all owners twice a second, so it reads only the lines that are
    new.
    """
    a, b, _ = pair
    assert a.names() == {b.owner.id: {"qwen": UNDECLARED}}
    read, offsets = os.pread, []
    monkeypatch.setattr(
        os, "pread", lambda fd, size, at: offsets.append((size, at)) or read(fd, size, at)
    )
    a.names()
    b.add_name("llama")
    assert a.names() == {b.owner.id: {"qwen": UNDECLARED, "llama": UNDECLARED}}
    assert [pair for pair in offsets if pair[1]] == [(len('+"llama"\n'), len('+"qwen"\n'))]
    assert len(offsets) == 1


def test_withdrawn_names_do_not_fill_the_file(pair):
    """A loop of `register` and `forget` must not make the file too large to be read."""
    a, b, file = pair
    for n in range(4 * SPARE_LINES):
        b.add_name(f"m{n}")
        b.publish_names({"qwen": UNDECLARED})
    assert a.names() == {b.owner.id: {"qwen": UNDECLARED}}
    assert len(file.read_bytes().splitlines()) < 2 * SPARE_LINES + 4


@pytest.mark.parametrize(
    "line",
    [
        b"+3\n",
        b"+\n",
        b"\xff\xfe\n",
        b'+"half',
        b"{}\n",
        b'+["llama", -1, 10]\n',
        b'+["llama", "1", 10]\n',
        b'+["llama", 1]\n',
        b"+[[], 1, 10]\n",
    ],
)
def test_a_line_that_is_no_name_changes_nothing(pair, line):
    """A line of another version, an incomplete line or nonsense is ignored."""
    a, b, file = pair
    with open(file, "ab") as more:
        more.write(line)
    assert a.names() == {b.owner.id: {"qwen": UNDECLARED}}


def test_a_file_that_is_too_large_is_not_read(pair):
    a, _, file = pair
    os.truncate(file, MOST_BYTES + 1)
    assert a.names() == {}


def test_deleted_names_are_written_again(pair, monkeypatch):
    """The monitor publishes the names once a second. It checks only now and then whether the file
    still exists.
    """
    a, b, file = pair
    file.unlink()
    b.publish_names({"qwen": UNDECLARED})
    assert a.names() == {}
    monkeypatch.setattr(name_files, "CHECK_SECONDS", 0.0)
    assert a.names() == {}
    b.publish_names({"qwen": UNDECLARED})
    assert a.names() == {b.owner.id: {"qwen": UNDECLARED}}


def test_a_changed_size_or_importance_is_one_more_line(pair):
    """The monitor publishes all models each second. What has not changed is not written again."""
    a, b, file = pair
    known = {"qwen": Declared(8 << 30, 5)}
    for _ in range(3):
        b.publish_names(known)
    assert file.read_bytes() == b'+"qwen"\n+["qwen", 8589934592, 5]\n'
    assert a.names() == {b.owner.id: known}


def test_names_of_dead_owners_are_not_shown_and_are_removed(new_owner_here, notebook):
    """A killed owner cannot remove its file. The next new owner removes it."""
    ledger, other = new_owner_here(), notebook()
    other.run("ledger.add_name('qwen')")
    file = ledger.directory / "owners" / f"{other.id}.names"
    assert ledger.names() == {other.id: {"qwen": UNDECLARED}} and file.exists()
    other.kill()
    assert ledger.names() == {} and file.exists()
    new_owner_here()
    assert not file.exists()
