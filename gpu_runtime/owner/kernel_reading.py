"""Brings a kernel's parked memory back for a message that may read it although no cell runs.

Completion, inspection and a debugger's view of variables read tensors. For such a message, the
memory returns by the same request as for a cell. But the wait is short, because the message has no
line in the notebook that shows a wait. If the memory does not return, the message is handled
without the memory, and each access to the memory raises.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from ..errors import StillInUse
from . import acquire
from .kernel_resident import NAME, KernelResident
from .pins import Anchor, AnchorRef, new_anchor
from .session import Session, log

WAIT_SECONDS = 5.0  # the longest wait for room; cells that are sent meanwhile wait too
ATTEMPTS = 40  # the most attempts while another thread prevents the return
AGAIN_SECONDS = 0.05  # the pause between two attempts
PAUSE_SECONDS = 60.0  # after a failed wait, messages are handled without a wait for this time


def bring_back(
    session: Session, resident: KernelResident, anchor: AnchorRef, timeout: float | None = None
) -> None:
    """Brings the kernel's memory onto its cards, and pins it with `anchor`.

    Just after the bytes have left, the thread that moved them still runs for a moment and prevents
    their return. So the return is tried again for two seconds. Each wait for room takes at most
    `timeout` seconds; None means no limit. Raises the errors of `acquire.obtain`.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return acquire.obtain(session, resident, anchor, timeout=timeout)
        except StillInUse:  # a thread prevented the return: try again after a pause
            time.sleep(AGAIN_SECONDS)
    return acquire.obtain(session, resident, anchor, timeout=timeout)


class Reading:
    """Brings the memory of one kernel back for messages that may read it."""

    def __init__(self, session: Session, returned: Callable[[], None]) -> None:
        """Serves the kernel of `session`. Calls `returned` after each return of the memory."""
        self._session = session
        self._returned = returned
        self._again_at = 0.0

    def hold(self, seconds: float = 0.0) -> Anchor | None:
        """Keeps the memory on its cards for as long as the caller keeps the returned object.

        The result is None if the kernel has no lease, or if its memory did not return in time: in
        `seconds`, or for a message in WAIT_SECONDS. After such a failure of a message, no return is
        tried for other messages for PAUSE_SECONDS.
        """
        resident = self._session.residents.get(NAME)
        if not isinstance(resident, KernelResident):
            return None
        anchors = [new_anchor()]  # empty once this method has ended: see pins.py
        pin = weakref.ref(anchors[0])
        if resident.enter(pin):
            return anchors.pop()
        clock = self._session.clock
        if clock() < self._again_at and not seconds:
            return None
        try:
            bring_back(self._session, resident, pin, seconds or WAIT_SECONDS)
        except Exception as error:  # the message is handled in any case
            log.debug("a message is handled while the kernel's memory is away: %s", error)
            self._again_at = clock() + PAUSE_SECONDS
            anchors.clear()
            return None
        self._again_at = 0.0
        self._returned()
        return anchors.pop()
