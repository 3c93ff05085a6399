"""Blocks of the user's own code that lease memory: the lease, the cap on torch, the measured use.

The use is measured by torch, and only on a real card that this process uses. In other cases the
measured figures are unknown; they are never reported as zero.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from msgspec.structs import replace

from ..devices.allocators import Peak, counts_bytes
from ..facts import NORMAL, Device, Footprint, Lease, Phase, PlacementRules, parse_importance
from ..safe_text import LONGEST_NAME, printable
from ..torch_modes import outside_modes
from ..units import parse_room, parse_seconds, show_bytes
from . import acquire, failures
from .pins import AnchorRef, Held
from .session import Session


class LeasedBlock:
    """The object that `rt.lease` yields: the lease and its device, and later the measured use.

    `peak_bytes` and `delta_bytes` are None while the block runs, and also if the use cannot be
    measured.
    """

    def __init__(self, lease: Lease, device: Device, torch: str = "") -> None:
        """`torch` is torch's name of the device in this process, such as cuda:0, or empty."""
        self.lease = lease
        self.device = device
        self._torch = torch
        self.bytes = lease.bytes
        self.peak_bytes: int | None = None
        self.delta_bytes: int | None = None
        self._before = 0
        self._peak: Peak | None = None  # None before the process uses CUDA
        # A cap needs CUDA, so a block that leases bytes starts CUDA if no code has started it.
        self._cuda = _cuda_of(torch, start=bool(self.bytes))
        if self._cuda:
            self._before = self._cuda.memory_allocated(self._torch)
            self._peak = Peak(self._cuda, self._torch)
            if self.bytes:  # a lease of nothing only measures
                self._cap()

    def _cap(self) -> None:
        """Limits torch to the bytes that it reserved before the block, plus the leased bytes."""
        reserved = self._cuda.memory_reserved(self._torch)
        fraction = (reserved + self.bytes) / self.device.total_bytes
        fraction = min(max(fraction, 0.01), 1.0)
        self._cuda.set_per_process_memory_fraction(fraction, self._torch)

    def end(self) -> None:
        """Measures the block's use of memory for the last time and lifts the cap on torch."""
        # Looked up again: the block may have started CUDA, and a child forked in it has no CUDA.
        cuda = _cuda_of(self._torch)
        if cuda:
            peak = self._peak.bytes if self._peak else cuda.max_memory_allocated(self._torch)
            self.peak_bytes = peak - self._before
            self.delta_bytes = cuda.memory_allocated(self._torch) - self._before
            cuda.set_per_process_memory_fraction(1.0, self._torch)

    def __repr__(self) -> str:
        peak = "unknown" if self.peak_bytes is None else show_bytes(self.peak_bytes)
        leased = show_bytes(self.bytes)
        return f"<{leased} on {self.device.id}; peak {peak}>"


def _cuda_of(name: str, *, start: bool = False) -> Any:
    """torch.cuda if torch already uses CUDA and `name` is torch's name of a card, else None.

    The result is also None if torch has an allocator that counts no bytes.

    If `start` is true, CUDA is started first, if torch can start it. The caller needs this, because
    `reset_peak_memory_stats` raises an error before CUDA has started.
    """
    torch = sys.modules.get("torch")
    if torch is None or not name.startswith("cuda"):
        return None
    cuda = torch.cuda
    if start and not cuda.is_initialized() and cuda.is_available():
        with contextlib.suppress(RuntimeError):  # this process is a fork of one that used CUDA
            cuda.init()
    return cuda if cuda.is_initialized() and counts_bytes(cuda) else None


def lease_memory(
    session: Session,
    size: str | int | None,
    purpose: str,
    importance: str | int,
    timeout: str | float | None,
) -> Held:
    """A `with` block in which the caller's own code has `size` bytes of leased memory.

    If `size` is None, the block leases nothing and only measures. `timeout` limits the wait for the
    memory; None means no limit.

    Raises BadSize and BadSetting at once. Entering the block raises DoesNotFit and Busy.
    """
    wanted_bytes = 0 if size is None else parse_room(size)
    rank = parse_importance(importance)
    seconds = None if timeout is None else parse_seconds(timeout)
    program = os.path.basename(session.owner.notebook or sys.argv[0]) or "python"
    name = f"{purpose or printable(program, LONGEST_NAME)}#{session.blocks.new_number()}"
    return _Block(session, name, wanted_bytes, rank, seconds)


class _Block(Held):
    """The `with` block of `lease_memory`. It yields a LeasedBlock, which outlives the block."""

    __slots__ = ("_session", "_name", "_wanted", "_running")

    def __init__(self, session: Session, name: str, *wanted: Any) -> None:
        """`wanted` has three values: bytes, importance, and the timeout in seconds or None."""
        super().__init__()
        self._session = session
        self._name = name
        self._wanted = wanted
        self._running: list[LeasedBlock] = []

    def _typed(self) -> tuple[str, str]:
        size = self._wanted[0]
        return f"rt.lease({(show_bytes(size) if size else None)!r})", "block"

    @outside_modes
    def _start(self, anchor: AnchorRef) -> LeasedBlock:
        session = self._session
        session.start_monitor()
        with acquire.in_one_line(session):
            lease = _lease_block(session, self._name, anchor, *self._wanted)
        id = lease.shares[0].device
        device = next(device for device in session.probe.devices if device.id == id)
        self._running.append(LeasedBlock(lease, device, session.probe.place(id).torch))
        return self._running[0]

    @outside_modes
    def _finish(self, error: BaseException | None) -> None:
        for block in self._running:
            block.end()
        _end_block(self._session, self._name)
        failures.finish_block(self._session, error)


class RoomForProcess(Held):
    """A `with` block that reserves room on one card for another process."""

    __slots__ = ("_session", "_name", "_wanted")

    def __init__(self, session: Session, pid: int, device: str, size: int, seconds: float) -> None:
        """At the start of the block, `size` bytes on `device` are reserved for the process `pid`.

        The process should take the bytes within `seconds` of the grant. Until then the bytes count
        as not yet measured.
        """
        super().__init__()
        self._session, self._name = session, f"return of pid {pid}#{session.blocks.new_number()}"
        self._wanted = (size, NORMAL, None, (device,), seconds)

    @outside_modes
    def _start(self, anchor: AnchorRef) -> Lease:
        self._session.start_monitor()
        return _lease_block(self._session, self._name, anchor, *self._wanted)

    @outside_modes
    def _finish(self, error: BaseException | None) -> None:
        _end_block(self._session, self._name)


def _lease_block(
    session: Session,
    name: str,
    anchor: AnchorRef,
    size: int,
    importance: int,
    timeout: float | None,
    devices: tuple[str, ...] = (),
    unseen_seconds: float = 0.0,
) -> Lease:
    """Claims `size` bytes until the block of code ends, on one of `devices` if given.

    `anchor` refers weakly to an object that lives as long as the block. During the first
    `unseen_seconds` the driver may still report the bytes as free. So the bytes count as not yet
    measured, and no other request gets them.
    """
    wanted = Lease(session.me, name, kind="block", importance=importance, movable=False)
    rules = PlacementRules(devices, policy=session.settings.gpu_placement)
    granted = False  # whether the request was granted: a grant removes our ticket from the book

    def is_here() -> bool:
        return name in session.blocks

    key = session.new_key(f"lease {name}")
    try:
        granted_steps = acquire.grants(
            session, key, wanted, Footprint.of(size), rules, timeout, is_here
        )
        for verdict in granted_steps:
            # No load settles this lease, so it is settled here. The monitor or the end of the block
            # publishes it.
            lease = replace(
                verdict.lease,
                shares=verdict.lease.target,
                target=(),
                phase=Phase.SETTLED,
                key="",
                settled_at=session.clock() + unseen_seconds,
            )
            session.blocks[name] = (lease, anchor)
            session.blocks.leased_bytes += lease.bytes
            granted = True
            return lease
        return session.blocks[name][0]
    finally:
        session.done_with(key.note)  # the key is released first, as in `acquire.obtain`
        if not granted:
            session.withdraw(key)


def _end_block(session: Session, name: str) -> None:
    lease, _ = session.blocks.pop(name, (None, None))
    for share in lease.shares if lease else ():
        session.forget_torch_limit(share.device)  # the block has lifted the cap
    if (
        not session.closed
    ):  # a closed session, or the session of a forked child, no longer owns the lease
        session.publish()
