"""The rows of the tab Leases: which process holds how many bytes on which device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpu_runtime.facts import UNUSUAL, Lease, Presence, ProcessState, Section, Snapshot, Stranger
from gpu_runtime.rendering.views import RESIDUE, clean, strangers_bytes

from .. import palette
from .cells import Cell, Column, Row
from .model_rows import model_kind
from .row_parts import (
    NO_ANSWER,
    NOTHING,
    UNKNOWN,
    bytes_cell,
    lasting,
    lease_name_cell,
    notebook_cell,
    state_cell,
    stepped,
)

LEASES = (
    Column("Notebook", hint="The notebook or process that holds the memory"),
    Column("User"),
    Column("Pid", True),
    Column("Kernel", hint="Whether its kernel runs a cell, and for how long"),
    Column("Holds"),
    Column("Device"),
    Column("Leased", True, "Bytes that the ledger granted"),
    Column("Measured", True, "Bytes that it really uses, where that is known"),
    Column("State"),
)


def leases(
    snapshot: Snapshot, styles: Mapping[str, palette.LeaseStyle] | None = None
) -> tuple[Row, ...]:
    """A row for each share of each lease in `snapshot`, for residue, and for unleased memory.

    `styles` has the style of each lease by its label.
    """
    rows: list[Row] = []
    for section in sorted(snapshot.sections.values(), key=_largest_first):
        process = _process_cells(section, snapshot)
        for lease in sorted(section.leases, key=lambda lease: (-lease.bytes, lease.name)):
            rows += _share_rows(lease, process, snapshot, styles or {})
        rows += _residue_rows(section, process)
    rows += [_stranger_row(stranger) for stranger in snapshot.strangers]
    rows += _unknown_stranger_rows(snapshot)
    return tuple(rows)


def _largest_first(section: Section) -> tuple[int, str]:
    return -sum(lease.bytes for lease in section.leases), section.owner.id


def _process_cells(section: Section, snapshot: Snapshot) -> tuple[Cell, ...]:
    """The first four cells of a row: notebook, user, pid and kernel."""
    owner = section.owner
    return (
        notebook_cell(owner, snapshot),
        Cell(clean(owner.user)),
        Cell(str(owner.pid), owner.pid),
        kernel_cell(section, snapshot.now, snapshot.presences.get(owner.id)),
    )


def _share_rows(
    lease: Lease,
    process: tuple[Cell, ...],
    snapshot: Snapshot,
    styles: Mapping[str, palette.LeaseStyle],
) -> Iterator[Row]:
    is_block = lease.kind == "block"
    hint = "memory for running code" if is_block else model_kind(lease)
    name = lease_name_cell(lease, hint, styles)
    filled_bytes = {share.device: share.bytes for share in lease.filled}
    for share in lease.shares:
        measured = filled_bytes.get(share.device, share.bytes)
        if is_block:
            measured = lease.measured_bytes
        cells = (
            name,
            Cell(share.device),
            bytes_cell(share.bytes, NOTHING),
            bytes_cell(measured, UNKNOWN),
            state_cell(lease, snapshot.now),
        )
        yield Row(f"{lease.id}/{share.device}", process + cells)
    for share in lease.target:
        cells = (
            name,
            Cell(share.device),
            bytes_cell(share.bytes, NOTHING),
            UNKNOWN,
            Cell("arriving"),
        )
        yield Row(f"{lease.id}/{share.device}/to", process + cells)


def _residue_rows(section: Section, process: tuple[Cell, ...]) -> Iterator[Row]:
    """A row for each device on which the process holds bytes beyond its leases."""
    for device, size in section.residue.items():
        if size:
            cells = (
                Cell(RESIDUE, kind="soft"),
                Cell(device),
                NOTHING,
                bytes_cell(size, UNKNOWN),
                NOTHING,
            )
            yield Row(f"{section.owner.id}//{device}", process + cells)


def _stranger_row(stranger: Stranger) -> Row:
    program = clean(stranger.command) or "unknown program"
    process = (
        Cell(program, hint="A program without a lease", kind="alarm"),
        Cell(clean(stranger.user)) if stranger.user else UNKNOWN,
        Cell(str(stranger.pid), stranger.pid),
        NOTHING,
    )
    id = f"stranger/{stranger.device}/{stranger.pid}"
    return Row(id, process + _unleased_cells(stranger.device, stranger.bytes))


def _unknown_stranger_rows(snapshot: Snapshot) -> Iterator[Row]:
    """A row for each device with unleased memory in use whose process is not known."""
    known = {stranger.device for stranger in snapshot.strangers}
    for view in snapshot.devices:
        if view.device.is_host or view.device.id in known:
            continue
        size = strangers_bytes(view)
        if size:
            hint = "The driver does not report which process holds it"
            process = (Cell("other programs", hint=hint, kind="alarm"), UNKNOWN, UNKNOWN, NOTHING)
            device = view.device.id
            yield Row(f"stranger/{device}", process + _unleased_cells(device, size))


def _unleased_cells(device: str, size: int | None) -> tuple[Cell, ...]:
    return (
        Cell("no lease", kind="soft"),
        Cell(device),
        NOTHING,
        bytes_cell(size, UNKNOWN),
        NOTHING,
    )


_UNUSUAL_HINTS = {
    ProcessState.STOPPED: "It keeps its memory. Let it continue: kill -CONT PID",
    ProcessState.DUMPING: "It has crashed, and keeps its memory until its core dump is written",
    ProcessState.SILENT: NO_ANSWER,
    ProcessState.ENDED: "Its memory is about to be freed",
}


def kernel_cell(section: Section, now: float, presence: Presence | None = None) -> Cell:
    """`busy 3 min`, `idle 12 min`, `no answer, 40 s`, `stopped`; `–` if it is not a kernel.

    `now` is by the snapshot's clock; `presence` is the state of its process, where it is known.
    """
    if presence is not None and presence.state in UNUSUAL:
        seconds = now - presence.since if presence.since else 0.0
        text = presence.text(now)
        if presence.state is ProcessState.SILENT:
            text = f"no answer, {lasting(seconds)}" if presence.since else "no answer"
        return Cell(text, seconds, _UNUSUAL_HINTS[presence.state], "alarm")
    if section.busy_since:
        seconds = now - section.busy_since
        return Cell(f"busy {lasting(seconds)}", seconds, "It runs a cell", "strong")
    if section.idle_since:
        seconds = now - section.idle_since
        return Cell(f"idle {lasting(seconds)}", -stepped(seconds), "It runs no cell")
    return Cell("–", None, "Unknown: it has run no cell yet, or it is no notebook", "soft")
