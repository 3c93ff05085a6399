"""A request that the stop button interrupts is shown as one line, such as `Interrupted after 6 s`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..units import show_seconds
from ..user_frames import shorten_interrupt
from . import loads
from .resident import Place, Resident
from .session import Session


@contextlib.contextmanager
def in_one_line(
    session: Session, outcome: Callable[[], str] = lambda: "nothing is held"
) -> Iterator[None]:
    """A `with` block that shows a KeyboardInterrupt as one line: the seconds and the `outcome`.

    After an interrupt, `outcome` is called at the end of the block. By then the code in the block
    must have released its request.
    """
    began = session.clock()
    try:
        yield
    except KeyboardInterrupt as error:
        waited = show_seconds(session.clock() - began)
        shorten_interrupt(error, f"Interrupted after {waited}; {outcome()}.")
        raise


def outcome_of(session: Session, resident: Resident) -> str:
    """The state of the model after an interrupted request for it.

    The text is the end of a sentence.
    """
    if load := session.loads.get(resident.spec.name):
        return loads.state(session, load)
    if resident.place is not Place.HERE:
        return "nothing is held"
    return f"{resident.spec.name} is on {resident.lease.where}, and not in use by this request"
