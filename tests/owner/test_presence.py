"""The state of a process, and the message for a caller that waits for it.

The state follows from what the operating system shows of the process, and from what the process
wrote into the book.
"""

from __future__ import annotations

import pytest

from gpu_runtime import Busy
from gpu_runtime.facts import Lease, Owner, Presence, ProcessState, Section
from gpu_runtime.ledgers.process_state import Sight
from gpu_runtime.owner.presence import presence
from gpu_runtime.rendering import plain, text

from .conftest import fakes

OWNER = Owner("box", "boot", 4121, 7)
BUSY, IDLE = Section(OWNER, busy_since=90.0), Section(OWNER, idle_since=80.0)
USED = Section(OWNER, leases=(Lease(OWNER.id, "qwen", last_used=70.0, settled_at=60.0),))


@pytest.mark.parametrize(
    "section, sight, silent_since, expected",
    [
        (BUSY, Sight.ALIVE, None, Presence(ProcessState.RUNNING, 90.0)),
        (IDLE, Sight.ALIVE, None, Presence(ProcessState.IDLE, 80.0)),
        (Section(OWNER), Sight.ALIVE, None, Presence(ProcessState.RUNNING)),
        (BUSY, Sight.ALIVE, 85.0, Presence(ProcessState.SILENT, 85.0)),
        (BUSY, Sight.STOPPED, 85.0, Presence(ProcessState.STOPPED)),
        (BUSY, Sight.DUMPING, 85.0, Presence(ProcessState.DUMPING)),
        (BUSY, Sight.DEAD, 85.0, Presence(ProcessState.ENDED)),
        (USED, Sight.UNKNOWN, None, Presence(ProcessState.SILENT, 70.0)),
        (Section(OWNER), Sight.UNKNOWN, None, Presence(ProcessState.SILENT)),
    ],
)
def test_the_state_of_a_process(section, sight, silent_since, expected):
    """The state follows from what is seen of the process now. That counts more than what the
    process wrote before.
    """
    assert presence(section, sight, silent_since) == expected


def test_who_waits_for_a_process_that_writes_a_core_dump_learns_who_and_why(
    runtime, shared_book, monkeypatch
):
    """The caller is told at once that the process is writing a core dump. In an earlier version the
    caller waited 7 s without any message.
    """
    a, b = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    fakes(a, qwen="14GiB")
    fakes(b, llama="14GiB")
    sights = {a._session.me: Sight.DUMPING, b._session.me: Sight.ALIVE}
    monkeypatch.setattr(b._session.ledger, "sights", lambda book, owners=None: sights)
    with a.use("qwen"), pytest.raises(Busy) as raised:
        b.preload("llama", timeout=0)
    label = a._session.owner.label
    assert f"{label} has crashed, and holds its memory while it writes a core dump." in str(
        raised.value
    )
    seen = b.status()
    assert f"{label}, writing a core dump" in text.status(seen)
    [lease] = plain.status(seen)["leases"]
    assert lease["owner_state"] == "writing a core dump"
