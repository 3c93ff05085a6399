"""The rows of the tabs Models, Leases and Queue: a Snapshot in, rows out. Pure.

Durations are told in steps of five seconds, so that a table of idle models changes twelve times a minute, not sixty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpu_runtime.facts import (
    THIS_PROCESS,
    Lease,
    ModelSpec,
    Owner,
    Phase,
    Section,
    Snapshot,
    Stranger,
    Ticket,
    Unanswered,
    cards_label,
    holder_label,
    importance_name,
    lease_state,
)
from gpu_runtime.rendering.views import (
    RESIDUE,
    clean,
    clock,
    holder,
    lease_name,
    strangers_bytes,
)
from gpu_runtime.units import show_bytes, show_seconds

from .. import palette
from ..widgets.table import Button, Cell, Column, Row

UNKNOWN = Cell("unknown", None, kind="soft")
NOTHING = Cell("–", None, kind="soft")
NO_ANSWER = (
    "Its process is stopped, or its interpreter is held; it does what was asked when it runs again"
)
ASLEEP_SECONDS = 2.0  # a request not refreshed for so long is passed over

MODELS = (
    Column("Model"),
    Column("Where", hint="Sort by where it lies: a GPU, host memory or its source on disk"),
    Column("Size", True),
    Column("State"),
    Column("Idle", True),
    Column("Uses", True, "How often it was used"),
    Column("Importance", hint="Who is more important makes others step aside"),
    Column("Keep", hint="What is pinned is never evicted"),
    Column("Owner", hint="The process that holds it"),
)
LEASES = (
    Column("Notebook", hint="The notebook, or the process, that holds the memory"),
    Column("User"),
    Column("Pid", True),
    Column("Kernel", hint="Whether its kernel runs a cell, and since when"),
    Column("Holds"),
    Column("Device"),
    Column("Leased", True, "Bytes that the ledger granted"),
    Column("Measured", True, "Bytes that it really takes, as far as that is known"),
    Column("In use"),
)
QUEUE = (
    Column("#", True, "Its place in the queue"),
    Column("Wants"),
    Column("For"),
    Column("Needs", True),
    Column("Waiting", True),
    Column("Importance"),
    Column("Waits for"),
)


# -- models -------------------------------------------------------------------------------------------------------


def models(
    snapshot: Snapshot,
    catalogue: Sequence[ModelSpec] = (),
    looks: Mapping[str, palette.Look] | None = None,
) -> tuple[Row, ...]:
    """Every model that is held, registered or in the catalogue; those on devices first, then by name."""
    looks = looks or {}
    rows, known = [], set()
    for section in snapshot.sections.values():
        held = {lease.name for lease in section.leases}
        for lease in section.leases:
            if lease.kind == "model":
                rows.append(
                    (
                        (lease.on_host, natural(lease.name)),
                        _model(lease, section.owner, snapshot, looks),
                    )
                )
        rows += [
            ((2, natural(name)), _loadable(name, section.owner, snapshot))
            for name in section.names
            if name not in held
        ]
        known.update(held, section.names)
    me = snapshot.owner
    if me.id not in snapshot.sections:
        rows += [
            (
                (2, natural(spec.name)),
                _catalogued(spec, f"{me.id}/{spec.name}", THIS_PROCESS, "registered"),
            )
            for spec in snapshot.specs
            if spec.name not in known
        ]
        known.update(spec.name for spec in snapshot.specs)
    rows += [
        ((3, natural(spec.name)), _catalogued(spec, f"/{spec.name}", "", "in the catalogue"))
        for spec in catalogue
        if spec.name not in known
    ]
    return tuple(row for _, row in sorted(rows, key=lambda pair: pair[0]))


def _model(
    lease: Lease, owner: Owner, snapshot: Snapshot, looks: Mapping[str, palette.Look]
) -> Row:
    idle = lease.idle_seconds(snapshot.now)
    kept = Cell("pinned", 1, "It does not step aside", "strong") if lease.keep else Cell("", 0)
    cells = (
        _named(lease, _kind(lease), looks),
        Cell(place(lease), None, lease.where),
        Cell(show_bytes(lease.bytes), lease.bytes),
        state(lease, snapshot.now),
        NOTHING if lease.pins or not lease.last_used else Cell(lasting(idle), _stepped(idle)),
        Cell(str(lease.uses), lease.uses),
        _importance(lease.importance),
        kept,
        owner_cell(owner, snapshot),
    )
    return Row(lease.id, cells, _buttons(lease, owner))


def _buttons(lease: Lease, owner: Owner) -> tuple[Button, ...]:
    """What can be asked of a lease, and why not where it cannot now."""
    going = f"It is {lease.phase}" if lease.phase is not Phase.SETTLED else ""
    pin = Button("unpin", "Unpin") if lease.keep else Button("pin", "Pin")
    if lease.on_host:
        return (Button("restore", "Restore", going), pin)
    in_use = (
        f"In use by {owner.label}"
        if lease.pins
        else "It is pinned; unpin it first"
        if lease.keep
        else ""
    )
    return (Button("evict", "Evict", going or in_use), pin)


def _loadable(name: str, owner: Owner, snapshot: Snapshot) -> Row:
    spec = (
        next((spec for spec in snapshot.specs if spec.name == name), None)
        if owner == snapshot.owner
        else None
    )
    size = Cell(show_bytes(spec.size), spec.size) if spec and spec.size else UNKNOWN
    importance = _importance(spec.importance) if spec else NOTHING
    cells = (
        Cell(clean(name)),
        Cell("disk"),
        size,
        Cell("not loaded", kind="soft"),
        NOTHING,
        NOTHING,
        importance,
        Cell("pinned" if spec and spec.keep else "", 0),
        owner_cell(owner, snapshot),
    )
    return Row(f"{owner.id}/{name}", cells, (Button("preload", "Preload"),))


def _catalogued(spec: ModelSpec, id: str, owner: str, said: str) -> Row:
    size = Cell(show_bytes(spec.size), spec.size) if spec.size else UNKNOWN
    why_not = "" if spec.enabled else "Its entry in the catalogue says enabled: false"
    cells = (
        Cell(clean(spec.name), hint=clean(spec.source)),
        Cell("disk"),
        size,
        Cell(said if spec.enabled else "disabled", kind="soft"),
        NOTHING,
        NOTHING,
        _importance(spec.importance),
        Cell("pinned" if spec.keep else "", 0),
        Cell(owner or "nobody yet", kind="soft"),
    )
    return Row(id, cells, (Button("preload", "Preload", why_not),))


def _kind(lease: Lease) -> str:
    told = (
        lease.backend,
        "" if lease.model_type == "other" else lease.model_type,
        lease.quantization,
    )
    return ", ".join(clean(word) for word in told if word)


# -- leases -------------------------------------------------------------------------------------------------------


def leases(snapshot: Snapshot, looks: Mapping[str, palette.Look] | None = None) -> tuple[Row, ...]:
    """Who holds what: every share of every lease, what processes hold beside them, and who leased nothing."""
    rows, silent = [], {one.owner.id: one.since for one in reversed(snapshot.unanswered)}
    for section in sorted(snapshot.sections.values(), key=_by_size):
        says = kernel(section, snapshot.now, silent.get(section.owner.id))
        for lease in sorted(section.leases, key=lambda lease: (-lease.bytes, lease.name)):
            rows += _shares(lease, section, says, snapshot, looks or {})
        rows += [
            _row(
                section,
                says,
                snapshot,
                f"{section.owner.id}//{device}",
                Cell(RESIDUE, kind="soft"),
                device,
                None,
                size,
            )
            for device, size in section.residue.items()
            if size
        ]
    return (*rows, *(_stranger(one) for one in snapshot.strangers), *_unknown_strangers(snapshot))


def _by_size(section: Section) -> tuple[int, str]:
    return -sum(lease.bytes for lease in section.leases), section.owner.id


def _shares(
    lease: Lease,
    section: Section,
    says: Cell,
    snapshot: Snapshot,
    looks: Mapping[str, palette.Look],
) -> Iterator[Row]:
    name = _named(
        lease, "memory for running code" if lease.kind == "block" else _kind(lease), looks
    )
    own = {share.device: share.bytes for share in lease.filled}
    for share in lease.shares:
        measured = (
            lease.measured_bytes if lease.kind == "block" else own.get(share.device, share.bytes)
        )
        yield _row(
            section,
            says,
            snapshot,
            f"{lease.id}/{share.device}",
            name,
            share.device,
            share.bytes,
            measured,
            state(lease, snapshot.now),
        )
    for share in lease.target:
        yield _row(
            section,
            says,
            snapshot,
            f"{lease.id}/{share.device}/to",
            name,
            share.device,
            share.bytes,
            None,
            Cell("arriving"),
        )


def _row(
    section: Section,
    says: Cell,
    snapshot: Snapshot,
    id: str,
    holds: Cell,
    device: str,
    leased: int | None,
    measured: int | None,
    used: Cell = NOTHING,
) -> Row:
    owner = section.owner
    return Row(
        id,
        (
            notebook(owner, snapshot),
            Cell(clean(owner.user)),
            Cell(str(owner.pid), owner.pid),
            says,
            holds,
            Cell(device),
            _bytes(leased, NOTHING),
            _bytes(measured, UNKNOWN),
            used,
        ),
    )


def _stranger(one: Stranger) -> Row:
    return Row(
        f"stranger/{one.device}/{one.pid}",
        (
            Cell(
                clean(one.command) or "unknown program",
                hint="A program that leases nothing",
                kind="alarm",
            ),
            Cell(clean(one.user)) if one.user else UNKNOWN,
            Cell(str(one.pid), one.pid),
            NOTHING,
            Cell("no lease", kind="soft"),
            Cell(one.device),
            NOTHING,
            _bytes(one.bytes, UNKNOWN),
            NOTHING,
        ),
    )


def _unknown_strangers(snapshot: Snapshot) -> Iterator[Row]:
    """Memory in use that nobody leased, where no process is known to hold it."""
    known = {one.device for one in snapshot.strangers}
    for view in snapshot.devices:
        size = 0 if view.device.is_host or view.device.id in known else strangers_bytes(view)
        if size:
            yield Row(
                f"stranger/{view.device.id}",
                (
                    Cell(
                        "other programs", hint="The driver does not say whose it is", kind="alarm"
                    ),
                    UNKNOWN,
                    UNKNOWN,
                    NOTHING,
                    Cell("no lease", kind="soft"),
                    Cell(view.device.id),
                    NOTHING,
                    _bytes(size, UNKNOWN),
                    NOTHING,
                ),
            )


def kernel(section: Section, now: float, silent_since: float | None = None) -> Cell:
    """`busy 3 min`, `idle 12 min`, `silent 40 s`; a process that is no kernel says nothing."""
    if silent_since is not None:
        return Cell(f"silent {lasting(now - silent_since)}", now - silent_since, NO_ANSWER, "alarm")
    if section.busy_since:
        return Cell(
            f"busy {lasting(now - section.busy_since)}",
            now - section.busy_since,
            "It runs a cell",
            "strong",
        )
    if section.idle_since:
        return Cell(
            f"idle {lasting(now - section.idle_since)}",
            -_stepped(now - section.idle_since),
            "It runs no cell",
        )
    return Cell("–", None, "It did not say: it has run no cell yet, or it is no notebook", "soft")


# -- the queue ----------------------------------------------------------------------------------------------------


def queue(snapshot: Snapshot) -> tuple[Row, ...]:
    """Who waits for room, in order, each with what it waits for; then what was asked of other processes."""
    waiting = [ticket for ticket in snapshot.tickets if ticket.verb == "use"]
    asked = [ticket for ticket in snapshot.tickets if ticket.verb != "use"]
    silent: dict[str, list[Unanswered]] = {}
    for one in snapshot.unanswered:
        silent.setdefault(one.ticket.key, []).append(one)
    return (
        *(
            _waits(ticket, place, snapshot, silent.get(ticket.key, []))
            for place, ticket in enumerate(waiting, 1)
        ),
        *(_asks(ticket, snapshot, silent.get(ticket.key, [])) for ticket in asked),
    )


def _silent(who: Sequence[Unanswered], snapshot: Snapshot) -> str:
    """`train.ipynb (pid 7) does not answer since 12:03:11.`"""
    names = " and ".join(_holder(one.owner.id, snapshot).text for one in who)
    since = clock(snapshot.wall - (snapshot.now - min(one.since for one in who)))
    return f"{names} do{'es' if len(who) == 1 else ''} not answer since {since}."


def _waits(ticket: Ticket, place: int, snapshot: Snapshot, silent: Sequence[Unanswered]) -> Row:
    need = " + ".join(f"{show_bytes(share.bytes)} on {share.device}" for share in ticket.need)
    size = sum(share.bytes for share in ticket.need)
    because = clean(ticket.because) or "room"
    if snapshot.now - ticket.refreshed > ASLEEP_SECONDS:
        quiet = lasting(snapshot.now - ticket.refreshed)
        because = f"itself: its process has been stopped for {quiet}, and others pass. {because}"
    elif silent:
        because = f"{_silent(silent, snapshot)} {because}"
    return Row(
        ticket.key,
        (
            Cell(str(place), place),
            Cell(clean(ticket.name), kind="strong"),
            _holder(ticket.owner, snapshot),
            Cell(need, size) if need else UNKNOWN,
            _since(ticket.arrived, snapshot),
            _importance(ticket.importance),
            Cell(because, kind="prose alarm" if silent else "prose"),
        ),
    )


def _asks(ticket: Ticket, snapshot: Snapshot, silent: Sequence[Unanswered]) -> Row:
    owner, name = ticket.name.partition("/")[0], lease_name(ticket.name)
    by = f", as {clean(ticket.said_by)} asked" if ticket.said_by else ""
    told = f" Asked by {clean(ticket.said_by)}." if ticket.said_by else ""
    return Row(
        ticket.key,
        (
            NOTHING,
            Cell(f"{ticket.verb} {clean(name)}", kind="strong"),
            _holder(ticket.owner, snapshot),
            NOTHING,
            _since(ticket.arrived, snapshot),
            NOTHING,
            Cell(f"{_silent(silent, snapshot)}{told}", hint=f"{NO_ANSWER}.", kind="prose alarm")
            if silent
            else Cell(f"the answer of {_holder(owner, snapshot).text}{by}", kind="prose"),
        ),
    )


def _since(arrived: float, snapshot: Snapshot) -> Cell:
    waited = max(0.0, snapshot.now - arrived)
    return Cell(lasting(waited), _stepped(waited), f"since {clock(snapshot.wall - waited)}")


# -- cells --------------------------------------------------------------------------------------------------------


def place(lease: Lease) -> str:
    """Where a lease is: its cards, such as `GPU: 0`, else `host`."""
    return cards_label(lease.shares or lease.target, lease.backend) or lease.where


def state(lease: Lease, now: float) -> Cell:
    """What a lease is doing. The column Idle has the duration of idleness."""
    doing = lease_state(lease, now)
    if doing.activity == "in use":
        return Cell(doing.text(lasting, least_seconds=5.0), doing.seconds, kind="strong")
    return Cell(doing.word, kind="soft" if doing.activity == "never used" else "")


def natural(name: str) -> list[tuple[int, int, str]]:
    """What a name is sorted by: its numbers by their value.

    >>> sorted(["bge-10", "bge-2", "Ada"], key=natural)
    ['Ada', 'bge-2', 'bge-10']
    """
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part.casefold())
        for part in re.split(r"(\d+)", name)
    ]


def lasting(seconds: float) -> str:
    """A duration in steps that a person can follow.

    >>> lasting(3), lasting(58), lasting(130), lasting(7300)
    ('< 5 s', '55 s', '2 min', '2 h')
    """
    return "< 5 s" if seconds < 5 else show_seconds(_stepped(seconds))


def _stepped(seconds: float) -> float:
    return max(0.0, seconds - seconds % (5 if seconds < 120 else 60))


def notebook(owner: Owner, snapshot: Snapshot) -> Cell:
    """The notebook by its name, its whole path on hover; for others, that it is none."""
    mine = THIS_PROCESS if owner.id == snapshot.owner.id else ""
    if not owner.notebook:
        return Cell(mine or "no notebook", kind="soft")
    return Cell(clean(owner.notebook.rsplit("/", 1)[-1]), None, clean(owner.notebook))


def owner_cell(owner: Owner, snapshot: Snapshot) -> Cell:
    return Cell(
        clean(holder_label(owner, snapshot.owner)),
        None,
        clean(f"{owner.notebook or 'no notebook'}, pid {owner.pid}, {owner.user}"),
    )


def _holder(owner_id: str, snapshot: Snapshot) -> Cell:
    section = snapshot.sections.get(owner_id)
    if section is not None:
        return owner_cell(section.owner, snapshot)
    return Cell(clean(holder(snapshot, owner_id)))


def _named(lease: Lease, hint: str, looks: Mapping[str, palette.Look]) -> Cell:
    """Its name, with the swatch that it has in every chart."""
    look = looks.get(palette.label(lease))
    colour, texture = (look.colour, look.texture) if look else ("", "")
    return Cell(clean(lease.name), None, hint, "strong", colour, texture)


def _importance(number: int) -> Cell:
    return Cell(importance_name(number), number)


def _bytes(size: int | None, otherwise: Cell) -> Cell:
    return otherwise if size is None else Cell(show_bytes(size), size)


def looks(snapshot: Snapshot) -> Mapping[str, palette.Look]:
    """The colours of what is held, the same as in every chart."""
    return palette.SHARED.looks(_labels(snapshot.leases()))


def _labels(held: Iterable[Lease]) -> list[str]:
    return [palette.label(lease) for lease in held]
