"""The load or the restore that runs now, for the front end that shows its progress.

A front end registers with `Runtime.tell_waits`. If the code that requests the model passes its own
progress function, the front end shows nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..backends.base import Progress
from ..facts import Load, Move
from .parts import Returned
from .resident import Resident
from .session import Session

LOADING = "loading"
RESTORING = "restoring"


class Arrival:
    """A load, or a restore from host memory. Its fields change until it has ended."""

    def __init__(
        self,
        name: str,
        verb: str,
        all_bytes: int,
        expected_seconds: float,
        earlier_seconds: float = 0.0,
    ) -> None:
        """The load or restore of the model `name`, which needs `all_bytes`.

        `expected_seconds` is the time that the model's last load or restore took; 0 if unknown. If
        the model returns in parts, this is the last part, and the copies of the earlier parts took
        `earlier_seconds`.
        """
        self.name = name
        self.verb = verb
        self.all_bytes = all_bytes
        self.done_bytes = 0
        self.expected_seconds = expected_seconds
        self.earlier_seconds = earlier_seconds
        self.seconds = 0.0  # how long the arrival took; 0 until it has ended
        self.ended = self.failed = False

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Notes that `done_bytes` of `all_bytes` are loaded. A backend calls this often."""
        self.done_bytes = done_bytes
        self.all_bytes = all_bytes


@contextlib.contextmanager
def shown(
    session: Session,
    resident: Resident,
    step: Load | Move,
    progress: Progress | None,
    earlier: Returned,
) -> Iterator[Progress | None]:
    """A `with` block around the load or restore. It yields the function to which a load reports its
    progress.

    Calls the session's front end twice: when the load or restore begins, and when it has ended. If
    the caller passes `progress`, or there is no front end, the block only yields `progress`.
    `earlier` are the parts that have returned before; they count in the bytes and the seconds.
    """
    told = session.on_arrival
    if told is None or progress is not None:
        yield progress
        return
    verb, expected = LOADING, resident.lease.reload_seconds
    if isinstance(step, Move):
        verb, expected = RESTORING, resident.lease.restore_seconds
    size = earlier.bytes + sum(share.bytes for share in step.shares)
    arrival = Arrival(resident.spec.name, verb, size, expected or 0.0, earlier.seconds)
    began = session.clock()
    told(arrival)
    try:
        yield arrival
    except BaseException:
        arrival.failed = True
        raise
    finally:
        arrival.seconds = earlier.seconds + session.clock() - began
        arrival.ended = True
        told(arrival)
