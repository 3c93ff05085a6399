"""Moves bytes that have left their card from RAM to a file on a local disk (`GPU_PARK_DIR`).

They are the memory of a notebook's own code, or a model of PyTorch, and move as a whole. A model that
can be loaded again moves only if its load is slower than the disk. The move begins when other memory
needs the RAM; that of a notebook also when it was idle for GPU_HIBERNATE_SECONDS, or by hand. The
process stays. If the bytes are needed meanwhile, they return from RAM, and the move ends without an
effect. The lease shows the bytes on the disk, which claim no host memory.
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
from ..errors import BadSetting, DoesNotFit, GpuError, LedgerUnavailable, StillInUse
from ..facts import DISK_SECONDS_PER_BYTE, HOST, KERNEL, Book, Lease, World
from ..units import GIB, MIB, show_bytes, show_seconds
from .resident import Place, Resident
from .session import Session, log

AGAIN_SECONDS = 60.0  # after a failure, nothing moves to the disk for so long
ROOM_SECONDS = 10.0  # how old the room on the disk may be in the book
SPARE_PART = 0.1  # of the disk that stays free if GPU_PARK_DISK_GB is not set
LEAST_MEASURED = 64 * MIB  # a smaller file shows no rate of the disk
MEASURED_SECONDS = 600.0  # how long a rate counts: the disk may have been busy
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
        cards = [device.id for device in session.probe.cards]
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
            kind = files.file_system_of(path)
            if not (files.is_network(kind) or kind in _IN_RAM):
                return path
            why = f"a directory on a local disk; this one is on {kind}"
    except OSError as error:
        why = f"a directory in which you can write; {error.strerror}"
    raise BadSetting("GPU_PARK_DIR", named, why)


def room(session: Session, book: Book, lease: Lease) -> int:
    """The bytes that the disk may take for `lease` beside those of all leases in `book`.

    Leases that can be loaded again get at most half of the room that the others leave. Raises GpuError, OSError.
    """
    disk = os.statvfs(directory(session))
    free = disk.f_bavail * disk.f_frsize
    most = session.settings.gpu_park_disk_gb
    others = [peer for peer in book.leases() if peer.id != lease.id]
    there = {peer.id: peer.bytes_on_disk for peer in others}
    if most is None:
        left = free - int(SPARE_PART * disk.f_blocks * disk.f_frsize)
    else:
        left = min(free, int(most * GIB) - sum(there.values()) - lease.disk_bytes)
    if lease.droppable:
        again = sum([there[peer.id] for peer in others if peer.droppable]) + lease.disk_bytes
        left = (left + again) // 2 - again
    return max(0, left)


def with_disk(session: Session, resident: Resident, lease: Lease, handle: Any) -> Lease:
    """The `lease` with the bytes of `handle` on the disk, and its room there. Without a disk, the same lease."""
    if session.settings.gpu_park_dir is None or handle is None:
        return lease
    left = 0
    if session.clock() >= resident.stow_again_at and resident.backend.stows(handle):
        try:
            book = session.ledger.read()
            if _is_slower(session, book, lease):
                left = room(session, book, lease)
        except (GpuError, OSError) as error:
            resident.stow_again_at = session.clock() + AGAIN_SECONDS
            if f"{error}" != session.disk_error:
                log.warning("parked memory stays in RAM: %s", error)
            session.disk_error = f"{error}"
    resident.room_seen_at = session.clock()
    left -= left % (1 << max(0, left.bit_length() - 10))  # else the book would change all the time
    on_disk = min(getattr(handle, "disk_bytes", 0), lease.bytes_on(HOST))
    return replace(
        lease,
        disk_bytes=on_disk,
        disk_room=left,
        stowing=lease.stowing and left > 0,
        disk_seconds=lease.own_bytes * session.disk_read_seconds_per_byte,
    )


def _is_slower(session: Session, book: Book, lease: Lease) -> bool:
    """Whether loading the `lease` again takes longer than the disk; then its bytes may go there.

    They would be written, compared and read. Pages in RAM that other processes use too stay anyway.
    """
    now = book.lease(lease.owner, lease.name)
    if now and now.copy and any(row.copy == now.copy for row in book.leases() if row.id != now.id):
        return False
    return (
        not lease.droppable
        or lease.reload_seconds > lease.own_bytes * session.disk_seconds_per_byte
    )


def _what(resident: Resident) -> str:
    return "parked memory" if resident.lease.kind == KERNEL else resident.spec.name


def stow(session: Session, resident: Resident, because: str, by: str = "") -> int:
    """Moves the bytes of `resident` in RAM to the disk. Returns their number; 0 if none is in RAM.

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


def start(session: Session, resident: Resident, because: str, by: str = "") -> bool:
    """As `stow`, in a thread of its own. A failure is logged. Returns whether it begins: not during such a move."""
    if not resident.stowing.acquire(blocking=False):
        return False

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
        log.warning("%s stays in RAM: %s", _what(resident), error)
    finally:
        if not size:
            resident.stowing.release()
    if size:
        try:
            threads.start(partial(work, size))
        except RuntimeError:  # the system starts no more threads: the work is done here
            work(size)
    return size > 0


def _reserve(session: Session, resident: Resident) -> int:
    """Reserves room on the disk, and returns the bytes that are to move. Raises DoesNotFit, GpuError."""
    size, name = resident.lease.ram_bytes, resident.spec.name
    if resident.handle is None or resident.place is not Place.AWAY or not size:
        return 0

    def reserve(book: Book, world: World) -> tuple[Book, int]:
        lease = book.lease(session.me, name)
        left = room(session, book, lease or resident.lease)
        if size > left or lease is None:
            return book, left
        return book.with_lease(replace(lease, disk_room=left, stowing=True)), left

    def reserved() -> int:
        """Reserves, and returns the room that was there. The own lease changes in the same turn as the book.

        Any thread's write publishes the own lease, and would withdraw a mark that only the book has.
        """
        left = session.transact(reserve)
        if size <= left:
            resident.lease = replace(resident.lease, disk_room=left, stowing=True)
        return left

    try:
        left = session.in_turn(reserved)
    except LedgerUnavailable:
        raise
    except (GpuError, OSError) as error:
        _pause(session, resident)  # else who waits for the room begins again at once
        if isinstance(error, GpuError):
            raise
        raise _failure(session, resident, size, error) from error
    if size > left:
        _pause(session, resident)
        raise DoesNotFit(
            f"{show_bytes(size)} of {_what(resident)} stays in RAM: the disk of {session.settings.gpu_park_dir} has "
            f"{show_bytes(max(0, left))} for it (GPU_PARK_DISK_GB).",
            name=name,
            need_bytes=size,
            device="disk",
        )
    return size


def _stow(session: Session, resident: Resident, size: int, because: str, by: str) -> None:
    """Writes the bytes, and then frees them in RAM. Raises GpuError; then they are in RAM as before."""
    backend: Any = resident.backend
    began = time.perf_counter()
    try:
        encrypted = session.settings.gpu_park_encrypt
        if (handle := resident.handle) is None:
            raise NotStill("it was released meanwhile")
        written = backend.write(handle, directory(session), encrypted=encrypted)
        resident.move_on(written)
    except NotStill as error:
        _settle(session, resident)
        name = resident.spec.name
        raise StillInUse(f"{_what(resident)} stays in RAM: {error}.", name=name) from None
    except Exception as error:
        _pause(session, resident)
        if isinstance(error, GpuError):
            raise
        raise _failure(session, resident, size, error) from error
    if size >= LEAST_MEASURED:
        session.disk_seconds_per_byte = (written.seconds + written.read_seconds) / size
        session.disk_read_seconds_per_byte = written.read_seconds / size
        session.disk_measured_at = session.clock()
    with resident.gate:
        if not resident.lease.disk_bytes:
            resident.ram_seconds = resident.lease.restore_seconds
        # The bytes are read and copied to the card at the same time.
        seconds = max(resident.lease.restore_seconds, written.read_seconds)
        resident.lease = replace(resident.lease, restore_seconds=seconds)
    _settle(session, resident)
    session.probe.empty_cache()
    trim_heap()
    took = show_seconds(time.perf_counter() - began)
    because = f"{because} It was written to {session.settings.gpu_park_dir} in {took}."
    lease = resident.lease
    session.note(lease, "stowed", "disk", because, fresh=True, size=size, device=HOST, by=by)


def _failure(session: Session, resident: Resident, size: int, error: Exception) -> GpuError:
    why = getattr(error, "strerror", None) or f"what was written there: its bytes {error}"
    named = session.settings.gpu_park_dir
    return GpuError(
        f"{show_bytes(size)} of {_what(resident)} stays in RAM: the disk of {named} fails ({why})."
    )


def _pause(session: Session, resident: Resident) -> None:
    resident.stow_again_at = session.clock() + AGAIN_SECONDS
    _settle(session, resident)


def _settle(session: Session, resident: Resident) -> None:
    """Publishes where the bytes are now."""
    before = resident.lease
    lease = replace(resident.lease, stowing=False)
    after = with_disk(session, resident, lease, resident.handle)
    with resident.gate:
        if resident.lease.shares == lease.shares:  # else another move has settled it
            resident.lease = after
    if after != lease or lease != before:
        session.publish()


def look_after(session: Session) -> None:
    """Publishes the room on the disk. Moves a notebook there that was parked and idle for GPU_HIBERNATE_SECONDS."""
    settings, now = session.settings, session.clock()
    if settings.gpu_park_dir is None:
        return
    if now - session.disk_measured_at >= MEASURED_SECONDS:
        session.disk_seconds_per_byte = DISK_SECONDS_PER_BYTE
        session.disk_read_seconds_per_byte = 0.0
    for resident in list(session.residents.values()):
        lease = resident.lease
        if resident.handle is None or lease.stowing or resident.place is Place.MOVING:
            continue
        if now - resident.room_seen_at >= ROOM_SECONDS:
            _settle(session, resident)
        idle = now - resident.last_used >= settings.gpu_hibernate_seconds
        if lease.kind == KERNEL and lease.on_host and resident.lease.stow_bytes and idle:
            seconds = show_seconds(settings.gpu_hibernate_seconds)
            start(session, resident, f"It was idle for {seconds}.")
