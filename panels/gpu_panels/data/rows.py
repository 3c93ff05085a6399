"""The rows of tables: the queue and the problems on the tab Now, models, leases and variables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpu_runtime import alerts
from gpu_runtime.facts import (
    HOST,
    KERNEL,
    THIS_PROCESS,
    USER,
    Event,
    Lease,
    ModelSpec,
    Owner,
    Phase,
    Presence,
    Problem,
    ProcessState,
    Section,
    Snapshot,
    Stranger,
    Ticket,
    Unanswered,
    away_word,
    cards_label,
    problems,
    why_not_moved,
)
from gpu_runtime.rendering import answers
from gpu_runtime.rendering.text import shorten
from gpu_runtime.rendering.views import (
    OWN_CODE,
    RESIDUE,
    STRANGERS,
    Process,
    clock,
    device_name,
    processes,
    strangers,
)
from gpu_runtime.safe_text import clean
from gpu_runtime.units import counted, show_bytes

from .. import palette
from .cells import (
    NO_ANSWER,
    NOTHING,
    UNKNOWN,
    Button,
    Cell,
    Column,
    Row,
    bytes_cell,
    holder_cell,
    if_awake,
    importance_cell,
    lasting,
    lease_name_cell,
    natural,
    notebook_cell,
    owner_cell,
    place,
    short,
    state_cell,
    stepped,
    waited_cell,
)
from .confirmations import VERBS, ticket_title

# -- the queue on the tab Now, the requests to other processes, and the strip of problems

QUEUE = (
    Column("#", True, "Place in the queue"),
    Column("Request"),
    Column("For"),
    Column("Needs", True),
    Column("Waiting", True),
    Column("Importance"),
    Column("Waits for"),
)


def queue(snapshot: Snapshot) -> tuple[Row, ...]:
    """The requests that wait for memory, in the order of the queue, then the requests to other processes."""
    silent: dict[str, list[Unanswered]] = {}
    for unanswered in snapshot.unanswered:
        silent.setdefault(unanswered.ticket.key, []).append(unanswered)
    asked = [ticket for ticket in snapshot.tickets if ticket.verb != "use"]
    rows = [
        _waiting_row(ticket, position, snapshot, silent.get(ticket.key, []))
        for position, ticket in enumerate(snapshot.waiting, 1)
    ]
    rows += [_asked_row(ticket, snapshot, silent.get(ticket.key, [])) for ticket in asked]
    return tuple(rows)


def _no_answer_since(silent: Sequence[Unanswered], snapshot: Snapshot) -> str:
    """A sentence such as `No answer since 12:03:11 from train.ipynb (pid 7).`"""
    names = " and ".join(holder_cell(unanswered.owner.id, snapshot).text for unanswered in silent)
    longest = snapshot.now - min(unanswered.since for unanswered in silent)
    return f"No answer since {clock(snapshot.wall - longest)} from {names}."


def _waiting_row(
    ticket: Ticket, position: int, snapshot: Snapshot, silent: Sequence[Unanswered]
) -> Row:
    because = clean(ticket.because) or "free memory"
    if snapshot.is_asleep(ticket):
        stopped = f"Its process has been stopped for {lasting(snapshot.now - ticket.refreshed)}"
        because = f"{stopped}; other requests overtake it. {because}"
    elif silent:
        because = f"{_no_answer_since(silent, snapshot)} {because}"
    cells = (
        Cell(str(position), position),
        Cell(ticket_title(ticket, snapshot), kind="strong"),
        holder_cell(ticket.owner, snapshot),
        Cell(ticket.need_text, ticket.need_bytes) if ticket.need else UNKNOWN,
        waited_cell(ticket.arrived, snapshot),
        importance_cell(ticket.importance),
        Cell(because, kind="prose alarm" if silent else "prose"),
    )
    section = snapshot.sections.get(ticket.owner)
    is_sum = section is not None and not section.owner.pid  # of another user's processes
    return Row(ticket.key, cells, () if is_sum else (end_wait(ticket, snapshot),))


def end_wait(ticket: Ticket, snapshot: Snapshot) -> Button:
    """The button that ends the wait of `ticket`, disabled if its process is stopped."""
    is_asleep = snapshot.is_asleep(ticket)
    why_not = "Its process is stopped, and cannot end its wait" if is_asleep else ""
    return Button("cancel", VERBS["cancel"], why_not)


def _asked_row(ticket: Ticket, snapshot: Snapshot, silent: Sequence[Unanswered]) -> Row:
    """The row of a request that waits for the answer of another process, such as an eviction."""
    owner_id, _, name = ticket.name.partition("/")
    title = snapshot.title(owner_id, name)
    cells = (
        NOTHING,
        Cell(f"{ticket.verb} {clean(title)}".rstrip(), kind="strong"),
        holder_cell(ticket.owner, snapshot),
        NOTHING,
        waited_cell(ticket.arrived, snapshot),
        NOTHING,
        _answer_cell(ticket, owner_id, snapshot, silent),
    )
    return Row(ticket.key, cells)


def _answer_cell(
    ticket: Ticket, owner_id: str, snapshot: Snapshot, silent: Sequence[Unanswered]
) -> Cell:
    person = clean(ticket.said_by)
    if silent:
        requested = f" Requested by {person}." if person else ""
        text = f"{_no_answer_since(silent, snapshot)}{requested}"
        return Cell(text, hint=f"{NO_ANSWER}.", kind="prose alarm")
    requested = f", requested by {person}" if person else ""
    return Cell(f"an answer from {holder_cell(owner_id, snapshot).text}{requested}", kind="prose")


# -- the notebooks and other processes on the tab Now: who holds what, since when, and what to press

NOTEBOOKS = (
    Column("Notebook", hint="The notebook or program that holds memory or waits for it"),
    Column("User"),
    Column("State"),
    Column("Last cell", hint="When its last cell ended, or since when the present one runs"),
    Column("On cards", True, "All that it holds on the cards, also its CUDA context and cache"),
    Column("In RAM", True, "What it holds in RAM, for example while it is parked"),
    Column("What", hint="Its models, the largest first, and its own code"),
)
MOST_NAMED = 3  # models in one cell
FAILED_SECONDS = 600.0  # for so long a failed load is shown
LONGEST_FAILURE = 160  # characters of it; its tooltip has all of them


def notebooks(snapshot: Snapshot) -> tuple[Row, ...]:
    """A row for each process that holds memory, waits for it or is a notebook.

    First those that do not answer or whose load failed, then those that hold most of the cards.
    """
    found = []
    for process in processes(snapshot):
        row = _notebook_row(process, snapshot)
        is_calm = "alarm" not in row.cells[2].kind
        found.append(((is_calm, -process.card_bytes), row))
    held: dict[tuple[int, str, str], int] = {}
    for stranger in snapshot.strangers:
        key = stranger.pid, stranger.command, stranger.user
        held[key] = held.get(key, 0) + (stranger.bytes or 0)  # the driver may give no number
    for (pid, command, user), size in held.items():
        cells = (
            Cell(clean(command) or "unknown program", hint=f"pid {pid}", kind="alarm"),
            Cell(clean(user)) if user else UNKNOWN,
            Cell("on its own", hint="It does not use gpu-console, so nothing can move its memory"),
            NOTHING,
            bytes_cell(size or None, UNKNOWN),
            NOTHING,
            NOTHING,
        )
        found.append(((True, -size), Row(f"stranger/{pid}", cells)))
    found.sort(key=lambda pair: pair[0])
    return tuple(row for _, row in found)


def _notebook_row(process: Process, snapshot: Snapshot) -> Row:
    section, owner, own = process.section, process.section.owner, process.section.lease(KERNEL)
    models = sorted(
        (lease for lease in section.leases if lease is not own), key=lambda lease: -lease.bytes
    )
    names = [f"{short(lease.name)}{_in_brackets(lease)}" for lease in models[:MOST_NAMED]]
    if len(models) > MOST_NAMED:
        names.append(f"{len(models) - MOST_NAMED} more")
    names += [f"{OWN_CODE}{_in_brackets(own)}"] if own else []
    cells = (
        notebook_cell(owner, snapshot)._replace(kind="strong"),
        Cell(process.user),
        _activity_cell(process, snapshot),
        _last_cell(section, snapshot.now),
        bytes_cell(process.card_bytes or None, NOTHING),
        bytes_cell(process.host_bytes or None, NOTHING),
        Cell(", ".join(names), kind="soft"),
    )
    button = _what_to_press(section, process.ticket, snapshot)
    return Row(owner.id, cells, (button,) if button else ())


def _in_brackets(lease: Lease) -> str:
    """What is special about the lease, such as ` (pinned)` or ` (12.0 GiB on disk)`; empty if nothing is."""
    away = f"{show_bytes(lease.bytes)} on disk" if lease.on_disk else away_word(lease)
    words = ["pinned"] if lease.keep else []
    words += [away] if away and away != "in RAM" else []  # the column In RAM says that
    return f" ({', '.join(words)})" if words else ""


def _activity_cell(process: Process, snapshot: Snapshot) -> Cell:
    """What the process does: it waits, does not answer, runs a cell, is parked, or is idle."""
    section, ticket = process.section, process.ticket
    kernel = kernel_cell(section, snapshot.now, snapshot.trouble(section.owner.id))
    if kernel.kind == "alarm":
        return kernel
    if failed := _failed_load(section, snapshot):
        because = clean(failed.because.rstrip("."))
        text = f"could not load {short(failed.title)}, {clock(failed.wall)}: {because}"
        return Cell(shorten(text, LONGEST_FAILURE), failed.wall, text, "prose alarm")
    if ticket is not None:
        waited = waited_cell(ticket.arrived, snapshot)
        return Cell(
            f"waits {waited.text}", waited.value, f"for {ticket.need_text or 'memory'}", "strong"
        )
    pins = [lease for lease in section.leases if lease.pins]
    if section.busy_since or pins:
        return Cell("runs", 0, f"uses {clean(pins[0].name)}" if pins else "", "strong")
    own = section.lease(KERNEL)
    if own is not None and own.on_host and not process.card_bytes:
        return state_of(own, snapshot)
    return Cell("idle")


def _failed_load(section: Section, snapshot: Snapshot) -> Event | None:
    """The newest load of this process, if it failed within FAILED_SECONDS and its caller did not end it."""
    for event in reversed(snapshot.events):
        if event.owner == section.owner.id and event.action in ("failed", "loaded", "restored"):
            is_failed = (event.action, event.reason) == ("failed", "load")
            is_new = snapshot.wall - event.wall < FAILED_SECONDS
            by_caller = event.because.startswith(("interrupted", "Stopped"))
            return event if is_failed and is_new and not by_caller else None
    return None


def _last_cell(section: Section, now: float) -> Cell:
    if section.busy_since:
        return Cell(
            f"for {lasting(now - section.busy_since)}", now - section.busy_since, "It runs now"
        )
    if since := min((use.pinned_since for use in section.leases if use.pinned_since), default=0.0):
        return Cell(f"for {lasting(now - since)}", now - since, "So long it has used its model")
    if section.idle_since:
        ago = now - section.idle_since
        return Cell(f"{lasting(ago)} ago", -stepped(ago))
    return NOTHING


def _what_to_press(section: Section, ticket: Ticket | None, snapshot: Snapshot) -> Button | None:
    """The one button that helps most: it ends a stop or a wait, or makes room by what is harmless and largest."""
    owner = section.owner
    if not owner.pid:  # the sum of another user's processes
        return None
    state = snapshot.state_of(owner.id)
    if state is ProcessState.STOPPED:
        return _button("resume", f"{owner.id}/", snapshot)
    if ticket is not None:
        return _button("cancel", ticket.key, snapshot)
    if state is ProcessState.SILENT:
        return _button("interrupt", f"{owner.id}/", snapshot)
    failed = _failed_load(section, snapshot)
    if failed is not None and failed.model in snapshot.names.get(owner.id, ()):
        return _button("preload", f"{owner.id}/{failed.model}", snapshot)
    on_cards = [lease for lease in section.leases if lease.on_device and lease.kind != "block"]
    if not on_cards:
        own = section.lease(KERNEL)
        return _with_target(buttons(own, owner)[0], own, snapshot) if own and own.shares else None
    largest = max(on_cards, key=lambda lease: (not lease.pins, lease.card_bytes))
    if largest.pins and section.busy_since:  # nothing of it can leave while its cell runs
        return _button("interrupt", f"{owner.id}/", snapshot)
    if largest.kind == KERNEL:
        return _with_target(buttons(largest, owner)[0], largest, snapshot)
    if largest.keep and not largest.pins:
        return _button("unpin", largest.id, snapshot)
    evict = Button("evict", f"Evict {short(largest.name)}", _why_not_evict(largest, owner))
    return _with_target(evict, largest, snapshot)


def _with_target(button: Button, lease: Lease, snapshot: Snapshot) -> Button:
    [awake] = if_awake([button], lease.owner, snapshot, lease.id)
    return awake._replace(verb=f"{button.verb} {lease.id}")


PROBLEMS = (Column("Problem"), Column("Since"), Column("Memory", True))

NO_PROBLEMS = "No problems"
# Between two snapshots; after a longer gap, the beginning of a new problem is unknown
GAP_SECONDS = 10.0


class Since(NamedTuple):
    """The beginning of a problem."""

    wall: float  # epoch seconds
    is_before: bool  # whether it began at an unknown time before `wall`


class FirstSeen:
    """When each problem was first seen, for problems whose beginning the snapshot does not give.

    If no snapshot was read for a while before, a problem may have begun long before: its time has `is_before`.
    """

    def __init__(self) -> None:
        self.times: dict[str, Since] = {}  # by the key of the problem
        self._read_wall = float("-inf")  # of the last snapshot, in epoch seconds

    def update(self, keys: Iterable[str], wall: float) -> None:
        """Adds new problems with these `keys`, seen at `wall` (epoch seconds), and removes ended ones."""
        now = Since(wall, wall - self._read_wall > GAP_SECONDS)
        self.times = {key: self.times.get(key, now) for key in keys}
        self._read_wall = wall


def problem_rows(
    snapshot: Snapshot, first_seen: FirstSeen, told: alerts.State | None = None
) -> tuple[Row, ...]:
    """A row for each problem in `snapshot`. `first_seen` is updated.

    With `told`, the state of alerts that somebody gets, a row says who knows of its problem, and has buttons for that.
    """
    found = problems(snapshot)
    first_seen.update([problem.key for problem in found], snapshot.wall)
    return tuple(_row(problem, snapshot, first_seen.times[problem.key], told) for problem in found)


def _row(problem: Problem, snapshot: Snapshot, seen: Since, told: alerts.State | None) -> Row:
    since = Since(problem.wall, False) if problem.wall else seen
    name = alerts.name_of(problem)
    marks = told.words(name, snapshot.wall) if told else ""
    cells = (
        Cell(clean(" · ".join(filter(None, (problem.text, marks)))), kind="prose alarm"),
        Cell("before" if since.is_before else "", since.wall, kind="time"),
        bytes_cell(problem.bytes or None, NOTHING),
    )
    buttons = [_button(verb, target, snapshot) for verb, target in problem.actions]
    if told:
        if name not in told.acknowledged:
            buttons.append(Button(f"ack {name}", "Acknowledge"))
        if not told.silence_of(name, snapshot.wall):
            buttons.append(Button(f"silence {name}", "Silence 1 h"))
        elif name in told.silenced:
            buttons.append(Button(f"end {name}", "End silence"))
    return Row(problem.key, cells, tuple(buttons))


def _button(verb: str, target: str, snapshot: Snapshot) -> Button:
    """The button for `verb` on a lease, a waiting request or a process. It sends `VERB TARGET`; see `pressed`."""
    if verb in ("resume", "interrupt"):
        # Only its user and root may send it a signal.
        user, me = snapshot.sections[target.partition("/")[0]].owner.user, snapshot.owner.user
        may = me in ("root", user) or not user
        only = f"Only {user} and root may {VERBS[verb].lower()} it; this page is {me}'s"
        return Button(f"{verb} {target}", VERBS[verb], "" if may else only)
    if verb == "cancel":
        ticket = next(ticket for ticket in snapshot.tickets if ticket.key == target)
        return end_wait(ticket, snapshot)._replace(verb=f"{verb} {target}")
    owner_id, _, name = target.partition("/")
    title = snapshot.title(owner_id, name)
    button = Button(verb, f"{VERBS[verb]} {short(title)}")
    [awake] = if_awake([button], owner_id, snapshot, target)
    return awake._replace(verb=f"{verb} {target}")


def pressed(button: str) -> tuple[str, str]:
    """The verb and the target of a pressed `button`. `button` is a text from a browser and can be anything."""
    verb, _, target = button.partition(" ")
    return verb, target


def summary(snapshot: Snapshot) -> str:
    """The number of problems, and what else is unusual: `No problems; 1 waits; sim:1 drained`."""
    count = len(problems(snapshot))
    words = [counted(count, "problem") if count else NO_PROBLEMS]
    if waits := len({ticket.owner for ticket in snapshot.waiting}):
        words.append(f"{waits} wait{'s' if waits == 1 else ''}")
    failed = sum(bool(_failed_load(section, snapshot)) for section in snapshot.sections.values())
    if failed:
        words.append(f"{counted(failed, 'load')} failed")
    words += [f"{view.device.id} drained" for view in snapshot.devices if view.drained]
    return "; ".join(words)


# -- the tabs Models and Leases: every model, the bytes of each process on each device, and its variables
#
# To add a column, add its name to MODELS, LEASES or HOLDERS, and its value to the rows. The columns of `rt.leases()`
# are in `gpu_runtime/owner/status.py`.

MODELS = (
    Column("Model"),
    Column(
        "Where",
        hint="On a card, in RAM, or on disk: in a file of its process, or only at its source",
    ),
    Column("Size", True),
    Column("State"),
    Column("Idle", True),
    Column("Uses", True, "How often it was used"),
    Column("Importance", hint="A more important model can evict a less important one"),
    Column("Keep", hint="A pinned model is never evicted"),
    Column("Owner", hint="The process that holds it"),
)

# The groups of the table, in their order. The rows of a group are sorted by name.
ON_DEVICE, ON_HOST, NOT_LOADED, IN_CATALOGUE = range(4)
SortKey = tuple[int, list[tuple[int, int, str]]]


def models(
    snapshot: Snapshot,
    catalogue: Sequence[ModelSpec] = (),
    styles: Mapping[str, palette.LeaseStyle] | None = None,
) -> tuple[Row, ...]:
    """A row for every model in `snapshot` or `catalogue`, grouped by the model's place, and sorted by name."""
    found: list[tuple[SortKey, Row]] = []
    known: set[str] = set()
    for section in snapshot.sections.values():
        found += _of_process(section, snapshot, styles or {})
        known.update(lease.name for lease in section.leases)
    for names in snapshot.names.values():
        known.update(names)
    me = snapshot.owner
    if me.id not in snapshot.sections:  # this process has not published its models yet
        for spec in snapshot.specs:
            if spec.name not in known:
                row = _unloaded_row(spec, f"{me.id}/{spec.name}", THIS_PROCESS, "registered")
                found.append(((NOT_LOADED, natural(spec.name)), row))
        known.update(spec.name for spec in snapshot.specs)
    for spec in catalogue:
        if spec.name not in known:
            row = _unloaded_row(spec, f"/{spec.name}", "none yet", "in the catalogue")
            found.append(((IN_CATALOGUE, natural(spec.name)), row))
    found.sort(key=lambda pair: pair[0])
    return tuple(row for _, row in found)


def _of_process(
    section: Section, snapshot: Snapshot, styles: Mapping[str, palette.LeaseStyle]
) -> Iterator[tuple[SortKey, Row]]:
    """The models that the process of `section` holds, and those that it could load."""
    held = {lease.name for lease in section.leases}
    for lease in section.leases:
        if lease.kind == "model":
            group = ON_HOST if lease.on_host else ON_DEVICE
            yield (group, natural(lease.name)), _held_row(lease, section.owner, snapshot, styles)
    for name in snapshot.names.get(section.owner.id, ()):
        if name not in held:
            yield (NOT_LOADED, natural(name)), _loadable_row(name, section.owner, snapshot)


def _held_row(
    lease: Lease, owner: Owner, snapshot: Snapshot, styles: Mapping[str, palette.LeaseStyle]
) -> Row:
    idle = lease.idle_seconds(snapshot.now)
    is_idle = lease.last_used and not lease.pins
    cells = (
        lease_name_cell(lease, model_kind(lease), styles),
        Cell(place(lease), None, cards_label(lease.shares, lease.backend)),
        Cell(show_bytes(lease.bytes), lease.bytes),
        state_cell(lease, snapshot.now),
        Cell(lasting(idle), stepped(idle)) if is_idle else NOTHING,
        Cell(str(lease.uses), lease.uses),
        importance_cell(lease.importance),
        _keep_cell(lease.keep, "strong"),
        owner_cell(owner, snapshot),
    )
    return Row(lease.id, cells, if_awake(buttons(lease, owner), owner.id, snapshot, lease.id))


def _keep_cell(keep: bool, kind: str = "") -> Cell:
    return Cell("pinned", 1, "It is never evicted", kind) if keep else Cell("", 0)


def buttons(lease: Lease, owner: Owner) -> tuple[Button, ...]:
    """The buttons of the `lease` of a model, or of a notebook's own code. One that cannot be pressed shows why."""
    if lease.kind == KERNEL and lease.on_host:
        return Button("unpark", "Unpark", _moving(lease)), VARIABLES
    if lease.kind == KERNEL:
        why_not = _moving(lease)
        if lease.pins:
            why_not = f"{owner.label} runs a cell"
        elif lease.fixed:
            why_not = f"Its process cannot move it ({lease.fixed})"
        elif not lease.movable:
            why_not = "It is exempt from parking (%gpu park never, or GPU_PARK=never)"
        return Button("park", "Park", why_not), VARIABLES
    if lease.kind != "model":
        return ()
    pin = Button("unpin", "Unpin") if lease.keep else Button("pin", "Pin")
    restore = Button("restore", "Restore", _moving(lease))
    if lease.on_host:
        return restore, pin
    evict = Button("evict", "Evict", _why_not_evict(lease, owner))
    return (restore, evict, pin) if lease.in_parts else (evict, pin)


def _moving(lease: Lease) -> str:
    return "" if lease.phase is Phase.SETTLED else f"It is {lease.phase}"


def _why_not_evict(lease: Lease, owner: Owner) -> str:
    if moving := _moving(lease):
        return moving
    if lease.pins:
        return f"In use by {owner.label}"
    if lease.keep:
        return "It is pinned; unpin it first"
    return ""


def _loadable_row(name: str, owner: Owner, snapshot: Snapshot) -> Row:
    """The row of a model that `owner` has registered and not loaded. Only this process knows its own pins."""
    is_mine = owner == snapshot.owner
    spec = next((spec for spec in snapshot.specs if is_mine and spec.name == name), None)
    declared = snapshot.declared.get(owner.id, {}).get(name)
    importance = importance_cell(declared.importance) if declared else NOTHING
    cells = _on_disk(
        Cell(clean(name)),
        declared.bytes if declared else 0,
        "not loaded",
        importance,
        bool(spec and spec.keep),
        owner_cell(owner, snapshot),
    )
    preload = if_awake((Button("preload", "Preload"),), owner.id, snapshot)
    return Row(f"{owner.id}/{name}", cells, preload)


def _unloaded_row(spec: ModelSpec, id: str, owner: str, state: str) -> Row:
    """The row of a model of the catalogue, or of a model that is registered here but is not in the book yet."""
    why_not = "" if spec.enabled else "Its catalogue entry has enabled: false"
    cells = _on_disk(
        Cell(clean(spec.name), hint=clean(spec.source)),
        spec.size,
        state if spec.enabled else "disabled",
        importance_cell(spec.importance),
        spec.keep,
        Cell(owner, kind="soft"),
    )
    return Row(id, cells, (Button("preload", "Preload", why_not),))


def _on_disk(
    name: Cell, size: int | None, state: str, importance: Cell, keep: bool, owner: Cell
) -> tuple[Cell, ...]:
    """The cells of a model that is not loaded."""
    size_cell = bytes_cell(size or None, UNKNOWN)
    state_cell, kept = Cell(state, kind="soft"), _keep_cell(keep)
    return name, Cell("disk"), size_cell, state_cell, NOTHING, NOTHING, importance, kept, owner


def model_kind(lease: Lease) -> str:
    """The backend, the type and the quantization of the model of `lease`, as far as they are known."""
    model_type = "" if lease.model_type == "other" else lease.model_type
    parts = (lease.backend, model_type, lease.quantization)
    return ", ".join(clean(part) for part in parts if part)


LEASES = (
    Column("Notebook", hint="The notebook or process that holds the memory"),
    Column("User"),
    Column("Pid", True),
    Column("Kernel", hint="Whether its kernel runs a cell, and for how long"),
    Column("Holds"),
    Column("Device"),
    Column("Leased", True, "Bytes that were granted to it: it may use so many"),
    Column("Measured", True, "Bytes that it really uses, where that is known"),
    Column("State"),
)

VARIABLES = Button("who", "Variables")
_HINTS = {
    "block": "memory for running code",
    USER: "the sum of all processes of this user",
    KERNEL: "all tensors of the notebook that belong to no model",
}


def leases(
    snapshot: Snapshot, styles: Mapping[str, palette.LeaseStyle] | None = None
) -> tuple[Row, ...]:
    """A row for each share of each lease, for the bytes of processes beyond their leases, and for memory without."""
    rows: list[Row] = []
    for section in sorted(snapshot.sections.values(), key=largest_first):
        process = _process_cells(section, snapshot)
        for lease in sorted(section.leases, key=lambda lease: (-lease.bytes, lease.name)):
            rows += _share_rows(lease, section.owner, process, snapshot, styles or {})
        rows += _residue_rows(section, process)
    return (*rows, *map(_stranger_row, strangers(snapshot)))


def largest_first(section: Section) -> tuple[int, int, str]:
    """A sort key: the process of the `section` that holds most on cards is first."""
    on_cards = sum(lease.bytes for lease in section.leases if not lease.on_host)
    return -on_cards, -sum(lease.bytes for lease in section.leases), section.owner.id


def _process_cells(section: Section, snapshot: Snapshot) -> tuple[Cell, ...]:
    owner = section.owner
    return (
        notebook_cell(owner, snapshot),
        Cell(clean(owner.user)),
        Cell(str(owner.pid), owner.pid) if owner.pid else NOTHING,
        kernel_cell(section, snapshot.now, snapshot.trouble(owner.id)),
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
    state = state_of(lease, snapshot)
    pressable: tuple[Button, ...] = ()
    if is_kernel:
        pressable = if_awake(buttons(lease, owner), owner.id, snapshot, lease.id)
    filled_bytes = {share.device: share.bytes for share in lease.filled}
    for share in lease.placed:
        measured = filled_bytes.get(share.device, share.bytes)
        if is_block:
            measured = lease.measured_bytes
        cells = (
            name,
            Cell(device_name(share.device)),
            bytes_cell(share.bytes, NOTHING),
            bytes_cell(measured, UNKNOWN),
            state,
        )
        yield Row(f"{lease.id}/{share.device}", process + cells, pressable)
        pressable = ()  # only the first row of a lease has the buttons
    for share in lease.target:
        cells = (
            name,
            Cell(device_name(share.device)),
            bytes_cell(share.bytes, NOTHING),
            UNKNOWN,
            Cell("arriving"),
        )
        yield Row(f"{lease.id}/{share.device}/to", process + cells)
    if copied := lease.shadow_beyond_target:
        sizes = (bytes_cell(copied, NOTHING), bytes_cell(copied, NOTHING))
        yield Row(
            f"{lease.id}/copy", (*process, name, Cell(device_name(HOST)), *sizes, Cell("a copy"))
        )


def state_of(lease: Lease, snapshot: Snapshot) -> Cell:
    """The state of the `lease`. Of a notebook's own code also why an attempt to park it has failed."""
    if lease.kind != KERNEL:
        return state_cell(lease, snapshot.now)
    if lease.on_host and lease.phase is Phase.SETTLED:
        since = f" since {clock(snapshot.wall - (snapshot.now - lease.away_since))}"
        place = "On a disk, and not in RAM" if lease.on_disk else "In RAM"
        hint = f"{place}{since if lease.away_since else ''}. It returns before the notebook's next cell"
        return Cell(away_word(lease), hint=hint)
    state = state_cell(lease, snapshot.now)
    if lease.pins or lease.moves_again_at <= snapshot.now:
        return state
    why = clean(why_not_moved(snapshot.events, lease))
    return Cell(f"{state.text}; it was not parked{why}", kind="short")


def _residue_rows(section: Section, process: tuple[Cell, ...]) -> Iterator[Row]:
    buttons = () if section.lease(KERNEL) else (VARIABLES,)  # else that lease's row has it
    for device in section.residue:
        for number, staying in enumerate(section.staying_on(device)):
            state = Cell(f"stays: {clean(staying.why)}", kind="short")
            cells = _beyond_leases(OWN_CODE, device, staying.bytes, state)
            yield Row(f"{section.owner.id}//{device}/{number}", process + cells, buttons)
            buttons = ()
        if cache := section.cache_on(device):
            cells = _beyond_leases(RESIDUE, device, cache, NOTHING)
            yield Row(f"{section.owner.id}//{device}", process + cells)


def _beyond_leases(name: str, device: str, size: int, state: Cell) -> tuple[Cell, ...]:
    return Cell(name, kind="soft"), Cell(device), NOTHING, bytes_cell(size, UNKNOWN), state


def _stranger_row(stranger: Stranger) -> Row:
    program, hint = clean(stranger.command) or "unknown program", "It does not use gpu-console"
    device, pid = stranger.device, stranger.pid
    if not pid:
        program, hint = STRANGERS, "The driver does not report which process holds it"
    why = "It does not use gpu-console: nothing was agreed for its memory"
    cells = (
        Cell(program, hint=hint, kind="alarm"),
        Cell(clean(stranger.user)) if stranger.user else UNKNOWN,
        Cell(str(pid), pid) if pid else UNKNOWN,
        NOTHING,
        Cell("on its own", kind="soft", hint=why),
        Cell(device),
        NOTHING,
        bytes_cell(stranger.bytes, UNKNOWN),
        NOTHING,
    )
    return Row(f"stranger/{device}/{pid}" if pid else f"stranger/{device}", cells)


_UNUSUAL_HINTS = {
    ProcessState.STOPPED: "It keeps its memory. Let it continue: kill -CONT PID",
    ProcessState.DUMPING: "It has crashed, and keeps its memory until its core dump is written",
    ProcessState.SILENT: NO_ANSWER,
    ProcessState.ENDED: "Its memory is about to be freed",
}


def kernel_cell(section: Section, now: float, trouble: Presence | None = None) -> Cell:
    """The state of a kernel: `busy 3 min`, `idle 12 min`, `no answer, 40 s` or `stopped`; `–` if it is unknown."""
    if trouble is not None:
        seconds, text = now - trouble.since if trouble.since else 0.0, trouble.text(now)
        if trouble.state is ProcessState.SILENT:
            text = f"no answer, {lasting(seconds)}" if trouble.since else "no answer"
        return Cell(text, seconds, _UNUSUAL_HINTS[trouble.state], "alarm")
    if section.busy_since:
        seconds = now - section.busy_since
        return Cell(f"busy {lasting(seconds)}", seconds, "It runs a cell", "strong")
    if section.idle_since:
        seconds = now - section.idle_since
        return Cell(f"idle {lasting(seconds)}", -stepped(seconds), "It runs no cell")
    return Cell("–", None, "Unknown: it has run no cell yet, or it is no notebook", "soft")


HOLDERS = (
    Column("Name", hint="A variable, an output, an error, a thread or a model"),
    Column("Kind"),
    Column("Device"),
    Column("Holds", True, "Bytes of everything that the name refers to"),
    Column("Frees", True, "Bytes that come free if this name alone is deleted"),
    Column("Cell", hint="The cell that assigned it"),
    Column("What"),
)


NO_VARIABLES = "No variable or output holds memory on a device."


class Variables(NamedTuple):
    """The answer of a process to the request for its variables; without a frame and trouble, it has not answered."""

    owner: str  # the id of the process
    label: str
    frame: Any = None  # the DataFrame of `rt.who`
    trouble: str = ""  # why there is no answer


def holders(answer: Variables) -> tuple[Row, ...]:
    """A row for each name that holds memory."""
    if answer.frame is None:
        return ()
    records = answer.frame.to_dict("records")
    return tuple(Row(f"{number}", _cells(record)) for number, record in enumerate(records))


def _cells(record: dict[str, Any]) -> tuple[Cell, ...]:
    size, alone = int(record["bytes"]), int(record["alone_bytes"])
    return (
        Cell(clean(record["name"]), kind="strong"),
        Cell(record["kind"]),
        Cell(device_name(record["device"])),
        Cell(show_bytes(size), size),
        Cell(show_bytes(alone), alone),
        Cell(clean(record["cell"]), kind="soft"),
        Cell(answers.what(record), kind="soft"),
    )


def variables(answer: Variables, row: str) -> dict[str, Any]:
    """What is shown below the row with the id `row`: a title, the table of variables, and sentences."""
    asking = "" if answer.frame is not None or answer.trouble else ": asking …"
    lines = [(answer.trouble, "alarm")] if answer.trouble else []
    if answer.frame is not None:
        known = {**answer.frame.attrs, "process": ""}  # the title names the process already
        none = [] if len(answer.frame) else [NO_VARIABLES]
        lines = [(line, "soft") for line in (*none, *answers.sentences(known))]
    return {
        "id": row,
        "title": f"Variables of {clean(answer.label)}{asking}",
        "columns": HOLDERS,
        "rows": holders(answer),
        "lines": lines,
    }
