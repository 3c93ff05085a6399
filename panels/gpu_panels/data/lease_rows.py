"""The rows of the tab Leases. They show how many bytes each process holds on each device.

To add a column, add its name to LEASES and its value to the rows. The columns of `rt.leases()` are in
`gpu_runtime/owner/dataframes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpu_runtime.facts import (
    HOST,
    KERNEL,
    UNUSUAL,
    Event,
    Lease,
    Owner,
    Phase,
    Presence,
    ProcessState,
    Section,
    Snapshot,
    Stranger,
)
from gpu_runtime.rendering.views import OWN_CODE, RESIDUE, clean, clock, strangers_bytes

from .. import palette
from .cells import Button, Cell, Column, Row
from .model_rows import model_kind
from .row_parts import (
    NO_ANSWER,
    NOTHING,
    UNKNOWN,
    bytes_cell,
    if_awake,
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

VARIABLES = Button("who", "Variables")
_HINTS = {
    "block": "memory for running code",
    KERNEL: "all tensors of the notebook that belong to no model",
}


def leases(
    snapshot: Snapshot, styles: Mapping[str, palette.LeaseStyle] | None = None
) -> tuple[Row, ...]:
    """A row for each share of each lease in `snapshot`.

    Further rows show the bytes that processes hold beyond their leases, and memory without a lease. `styles` has the
    style of each lease by its label.
    """
    rows: list[Row] = []
    for section in sorted(snapshot.sections.values(), key=_largest_first):
        process = _process_cells(section, snapshot)
        for lease in sorted(section.leases, key=lambda lease: (-lease.bytes, lease.name)):
            rows += _share_rows(lease, section.owner, process, snapshot, styles or {})
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
    owner: Owner,
    process: tuple[Cell, ...],
    snapshot: Snapshot,
    styles: Mapping[str, palette.LeaseStyle],
) -> Iterator[Row]:
    is_block = lease.kind == "block"
    is_kernel = lease.kind == KERNEL
    name = lease_name_cell(lease, _HINTS.get(lease.kind) or model_kind(lease), styles)
    if is_kernel:
        name = name._replace(text=OWN_CODE)  # the first column has the notebook's name
    state = kernel_state(lease, snapshot) if is_kernel else state_cell(lease, snapshot.now)
    buttons = if_awake(kernel_buttons(lease, owner), owner.id, snapshot) if is_kernel else ()
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
            state,
        )
        yield Row(f"{lease.id}/{share.device}", process + cells, buttons)
        buttons = ()  # only the first row of a lease has the buttons
    for share in lease.target:
        cells = (
            name,
            Cell(share.device),
            bytes_cell(share.bytes, NOTHING),
            UNKNOWN,
            Cell("arriving"),
        )
        yield Row(f"{lease.id}/{share.device}/to", process + cells)
    if copied := lease.shadow_beyond_target:
        sizes = (bytes_cell(copied, NOTHING), UNKNOWN)
        yield Row(f"{lease.id}/copy", (*process, name, Cell(HOST), *sizes, Cell("a copy")))


def kernel_state(lease: Lease, snapshot: Snapshot) -> Cell:
    """A cell with the state of the memory of a notebook's own code. `lease` is the lease of this memory.

    Examples are `parked` (moved to host memory) and `in use for 2 min`. If an attempt to park the notebook has failed,
    the cell shows the reason until the next attempt is due.
    """
    if lease.on_host and lease.phase is Phase.SETTLED:
        since = f" since {clock(snapshot.wall - (snapshot.now - lease.away_since))}"
        hint = "In host memory{}. It returns before the notebook's next cell"
        return Cell("parked", hint=hint.format(since if lease.away_since else ""))
    state = state_cell(lease, snapshot.now)
    if lease.pins or lease.moves_again_at <= snapshot.now:
        return state
    why = why_it_stays(lease, snapshot.events)
    return Cell(f"{state.text}; it was not parked{why and ': ' + why}", kind="short")


def why_it_stays(lease: Lease, events: Sequence[Event]) -> str:
    """The reason why the last attempt to move the memory of `lease` to host memory failed; "" if unknown.

    `lease` is the lease of a notebook's own code. The notebook's process recorded the reason in `events`.
    """
    for event in reversed(events):
        if event.answers:  # the answer to an order, which may fail for another reason
            continue
        if (event.owner, event.model, event.action) == (lease.owner, lease.name, "failed"):
            return clean(event.because.partition(": ")[2].rstrip("."))
    return ""


def kernel_buttons(lease: Lease, owner: Owner) -> tuple[Button, ...]:
    """The buttons for the memory of a notebook's own code. A button that cannot be pressed now shows the reason."""
    moving = "" if lease.phase is Phase.SETTLED else f"It is {lease.phase}"
    if lease.on_host:
        return Button("unpark", "Unpark", moving), VARIABLES
    why_not = moving
    if lease.pins:
        why_not = f"{owner.label} runs a cell"
    elif not lease.movable:
        why_not = "Parking is turned off in this notebook (GPU_PARK=never)"
    return Button("park", "Park", why_not), VARIABLES


def _residue_rows(section: Section, process: tuple[Cell, ...]) -> Iterator[Row]:
    """A row for each device on which the process of `section` holds bytes beyond its leases."""
    buttons = () if section.lease(KERNEL) else (VARIABLES,)  # else that lease's row has it
    for device in section.residue:
        for number, one in enumerate(section.staying_on(device)):
            state = Cell(f"stays: {clean(one.why)}", kind="short")
            cells = _beyond_leases(OWN_CODE, device, one.bytes, state)
            yield Row(f"{section.owner.id}//{device}/{number}", process + cells, buttons)
            buttons = ()
        if cache := section.cache_on(device):
            cells = _beyond_leases(RESIDUE, device, cache, NOTHING)
            yield Row(f"{section.owner.id}//{device}", process + cells)


def _beyond_leases(name: str, device: str, size: int, state: Cell) -> tuple[Cell, ...]:
    return Cell(name, kind="soft"), Cell(device), NOTHING, bytes_cell(size, UNKNOWN), state


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
    """A row for each device that has unleased memory in use, if no process is known to use this memory."""
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
    """A cell with the state of a kernel: `busy 3 min`, `idle 12 min`, `no answer, 40 s` or `stopped`.

    The cell is `–` if the process is no kernel, or has run no cell yet. `now` is a time of the snapshot's clock.
    `presence` is the state of the process, or None if it is unknown.
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
