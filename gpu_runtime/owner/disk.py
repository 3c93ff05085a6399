"""Moves a notebook's parked bytes from RAM to a file on a local disk (`GPU_PARK_DIR`).

Only bytes of a notebook's own code move there, as a whole, while the notebook is parked. The move
begins when other memory needs the RAM, when the notebook was idle for GPU_HIBERNATE_SECONDS, or by
hand. The process stays. If its memory is needed meanwhile, it returns from RAM, and the move ends
without an effect. The lease shows the bytes on the disk, which claim no host memory.
"""

from __future__ import annotations

import importlib.util
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from .. import files, threads
from ..backends.base import NotStill
from ..devices.process_memory import trim_heap
from ..errors import BadSetting, DoesNotFit, GpuError, StillInUse
from ..facts import HOST, KERNEL, Book, Lease, World
from ..ledgers.access import file_system_of, is_network
from ..units import GIB, show_bytes, show_seconds
from .resident import Place
from .session import Session, log

KernelResident = Any  # its module imports this one
AGAIN_SECONDS = 60.0  # after a failure, nothing moves to the disk for so long
ROOM_SECONDS = 10.0  # how old the room on the disk may be in the book
SPARE_PART = 0.1  # of the disk that stays free if GPU_PARK_DISK_GB is not set
_IN_RAM = ("tmpfs", "ramfs")

UNSET = (
    "no disk is named for parked memory, so it stays in RAM.\n"
    "  Name a directory on a local disk before the kernel starts:  GPU_PARK_DIR=/var/tmp"
)

NO_CIPHER = (
    "GPU_PARK_ENCRYPT needs the library cryptography, which is not installed.\n"
    "  Install it:  pip install 'gpu-console[encrypt]'"
)
SIMULATED = (
    "GPU_PARK_ENCRYPT needs a real card: on a simulated one parked memory stays readable.\n"
    "  Without a card:  GPU_PARK_ENCRYPT=0"
)


def directory(session: Session) -> Path:
    """The directory of the files. It is made if it is missing.

    Raises GpuError if the setting is unset or the bytes cannot be encrypted as asked, and BadSetting
    if the directory is not on a local disk, or if another user could replace it.
    """
    named = session.settings.gpu_park_dir
    if named is None:
        raise GpuError(UNSET)
    if session.settings.gpu_park_encrypt:
        if importlib.util.find_spec("cryptography") is None:
            raise GpuError(NO_CIPHER)
        cards = [one.id for one in session.probe.devices if not one.is_host]
        if any(session.probe.place(card).counted for card in cards):
            raise GpuError(SIMULATED)
    path = Path(os.path.expanduser(named))
    try:
        if not path.is_absolute():
            why = "an absolute path"
        elif weak := files.weak_step(path):
            why = f"a directory that only you and root can replace; {weak}"
        else:
            files.make_directory(path)
            kind = file_system_of(path)
            if not (is_network(kind) or kind in _IN_RAM):
                return path
            why = f"a directory on a local disk; this one is on {kind}"
    except OSError as error:
        why = f"a directory in which you can write; {error.strerror}"
    raise BadSetting("GPU_PARK_DIR", named, why)


def room(session: Session, book: Book) -> int:
    """The bytes that the disk may take beside those of all owners in `book`. Raises GpuError, OSError."""
    disk = os.statvfs(directory(session))
    free = disk.f_bavail * disk.f_frsize
    most = session.settings.gpu_park_disk_gb
    if most is None:
        return max(0, free - int(SPARE_PART * disk.f_blocks * disk.f_frsize))
    others = [lease for lease in book.leases() if lease.owner != session.me and lease.stowing]
    taken = sum([lease.disk_bytes for lease in book.leases()])
    taken += sum([lease.stow_bytes for lease in others])
    return max(0, min(free, int(most * GIB) - taken))


def with_disk(session: Session, resident: KernelResident, lease: Lease) -> Lease:
    """The `lease` of a notebook with its bytes on the disk, and the room that it has there."""
    left = 0
    if session.settings.gpu_park_dir is not None and session.clock() >= resident.stow_again_at:
        try:
            left = room(session, session.ledger.read())
        except (GpuError, OSError) as error:
            resident.stow_again_at = session.clock() + AGAIN_SECONDS
            log.warning("parked memory stays in RAM: %s", error)
    resident.room_seen_at = session.clock()
    left -= left % (1 << max(0, left.bit_length() - 10))  # else the book would change all the time
    on_disk = resident.handle.disk_bytes if resident.handle is not None else 0
    return replace(lease, disk_bytes=on_disk, disk_room=left, stowing=lease.stowing and left > 0)


def stow(session: Session, resident: KernelResident, because: str, by: str = "") -> int:
    """Moves the parked bytes of this notebook to the disk. Returns their number; 0 if none is in RAM.

    `because` is the sentence of the event, and `by` the person who requested it. Raises GpuError.
    """
    key = session.new_key("stow")
    try:
        with resident.stowing:
            size = _reserve(session, resident)
            if size:
                work = partial(_stow, session, resident, size, because, by)
                session.uninterrupted(key, work)
            return size
    finally:
        session.done_with(key.note)


def start(session: Session, resident: KernelResident, because: str, by: str = "") -> None:
    """As `stow`, in a thread of its own. A failure is logged. Nothing happens during such a move."""
    if not resident.stowing.acquire(blocking=False):
        return

    def work(size: int) -> None:
        """Moves the bytes."""
        try:
            _stow(session, resident, size, because, by)
        except GpuError as error:
            log.warning("%s", error)
        finally:
            resident.stowing.release()

    size = 0
    try:
        size = _reserve(session, resident)
    except (GpuError, OSError) as error:
        log.warning("parked memory stays in RAM: %s", error)
    finally:
        if not size:
            resident.stowing.release()
    if size:
        threads.start(partial(work, size))


def _reserve(session: Session, resident: KernelResident) -> int:
    """Reserves room on the disk, and returns the bytes that are to move. Raises DoesNotFit, GpuError."""
    handle: Any = resident.handle
    if handle is None or resident.place is not Place.AWAY:
        return 0
    size = int(handle.away_bytes - handle.disk_bytes)
    if not size:
        return 0

    def reserve(book: Book, world: World) -> tuple[Book, int]:
        left = room(session, book)
        lease = book.lease(session.me, KERNEL)
        if size > left or lease is None:
            return book, left
        return book.with_lease(replace(lease, disk_room=left, stowing=True)), left

    left = session.decide(reserve)
    if size > left:
        _pause(session, resident)
        raise DoesNotFit(
            f"{show_bytes(size)} of parked memory stays in RAM: the disk of {session.settings.gpu_park_dir} has "
            f"{show_bytes(max(0, left))} for it (GPU_PARK_DISK_GB).",
            name=KERNEL,
            need_bytes=size,
            device="disk",
        )
    resident.lease = replace(resident.lease, disk_room=left, stowing=True)
    return size


def _stow(session: Session, resident: KernelResident, size: int, because: str, by: str) -> None:
    """Writes the bytes, and then frees them in RAM. Raises GpuError; then they are in RAM as before."""
    backend: Any = resident.backend
    began = time.perf_counter()
    named = session.settings.gpu_park_dir
    try:
        encrypted = session.settings.gpu_park_encrypt
        written = backend.write(resident.handle, directory(session), encrypted=encrypted)
        if not resident.begin_moving():
            raise NotStill("its memory returned")
        try:
            backend.move_on(resident.handle, written)
        finally:
            resident.stay()
    except NotStill as error:
        _settle(session, resident)
        raise StillInUse(f"parked memory stays in RAM: {error}.", name=KERNEL) from None
    except Exception as error:
        if isinstance(error, GpuError):
            raise
        _pause(session, resident)
        why = getattr(error, "strerror", None) or f"what was written there: its bytes {error}"
        raise GpuError(
            f"{show_bytes(size)} of parked memory stays in RAM: the disk of {named} fails ({why})."
        ) from error
    lease = resident.lease
    seconds = lease.restore_seconds + written.read_seconds
    resident.lease = replace(lease, restore_seconds=seconds)
    _settle(session, resident)
    session.probe.empty_cache()
    trim_heap()
    took = show_seconds(time.perf_counter() - began)
    because = f"{because} It was written to {named} in {took}."
    lease = resident.lease
    session.note(lease, "stowed", "disk", because, fresh=True, size=size, device=HOST, by=by)


def _pause(session: Session, resident: KernelResident) -> None:
    resident.stow_again_at = session.clock() + AGAIN_SECONDS
    _settle(session, resident)


def _settle(session: Session, resident: KernelResident) -> None:
    """Publishes where the bytes are now."""
    before = resident.lease
    lease = replace(resident.lease, stowing=False)
    after = with_disk(session, resident, lease)
    with resident.gate:
        if resident.lease.shares == lease.shares:  # else another move has settled it
            resident.lease = after
    if after != lease or lease != before:
        session.publish()


def look_after(session: Session, resident: KernelResident) -> None:
    """Moves the memory of a notebook that was parked and idle for GPU_HIBERNATE_SECONDS to the disk.

    Also publishes the room on the disk.
    """
    settings, lease, now = session.settings, resident.lease, session.clock()
    if settings.gpu_park_dir is None or lease.stowing or resident.place is Place.MOVING:
        return
    if now - resident.room_seen_at >= ROOM_SECONDS:
        _settle(session, resident)
    idle = now - resident.last_used
    if lease.on_host and resident.lease.stow_bytes and idle >= settings.gpu_hibernate_seconds:
        start(session, resident, f"It was idle for {show_seconds(settings.gpu_hibernate_seconds)}.")
