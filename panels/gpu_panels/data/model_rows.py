"""The rows of the tab Models: every model that has a lease, is registered or is in the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpu_runtime.facts import THIS_PROCESS, Lease, ModelSpec, Owner, Phase, Section, Snapshot
from gpu_runtime.rendering.views import clean
from gpu_runtime.units import show_bytes

from .. import palette
from .cells import Button, Cell, Column, Row
from .row_parts import (
    NOTHING,
    UNKNOWN,
    if_awake,
    importance_cell,
    lasting,
    lease_name_cell,
    natural,
    owner_cell,
    place,
    state_cell,
    stepped,
)

MODELS = (
    Column("Model"),
    Column("Where", hint="On a GPU, in host memory, or only at its source on disk"),
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
    """A row for every model in `snapshot` or `catalogue`. The rows are grouped by the model's place, and sorted by
    name.

    `styles` has the style of each lease by its label.
    """
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
    """The rows of the models that the process of `section` holds, and of the models that it could load."""
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
        Cell(place(lease), None, lease.where),
        Cell(show_bytes(lease.bytes), lease.bytes),
        state_cell(lease, snapshot.now),
        Cell(lasting(idle), stepped(idle)) if is_idle else NOTHING,
        Cell(str(lease.uses), lease.uses),
        importance_cell(lease.importance),
        _keep_cell(lease.keep, "strong"),
        owner_cell(owner, snapshot),
    )
    return Row(lease.id, cells, if_awake(buttons(lease, owner), owner.id, snapshot))


def _keep_cell(keep: bool, kind: str = "") -> Cell:
    return Cell("pinned", 1, "It is never evicted", kind) if keep else Cell("", 0)


def buttons(lease: Lease, owner: Owner) -> tuple[Button, ...]:
    """The buttons of a model's `lease`. A button that cannot be pressed now shows the reason."""
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
    """The row of a model that `owner` has registered and not loaded.

    Whether the model is pinned is known only if `owner` is this process.
    """
    is_mine = owner == snapshot.owner
    spec = next((spec for spec in snapshot.specs if is_mine and spec.name == name), None)
    declared = snapshot.declared.get(owner.id, {}).get(name)
    size = declared.bytes if declared else 0
    cells = (
        Cell(clean(name)),
        Cell("disk"),
        Cell(show_bytes(size), size) if size else UNKNOWN,
        Cell("not loaded", kind="soft"),
        NOTHING,
        NOTHING,
        importance_cell(declared.importance) if declared else NOTHING,
        _keep_cell(bool(spec and spec.keep)),
        owner_cell(owner, snapshot),
    )
    preload = if_awake((Button("preload", "Preload"),), owner.id, snapshot)
    return Row(f"{owner.id}/{name}", cells, preload)


def _unloaded_row(spec: ModelSpec, id: str, owner: str, state: str) -> Row:
    """The row of a model of the catalogue, or of a model that is registered here but is not in the book yet."""
    why_not = "" if spec.enabled else "Its catalogue entry has enabled: false"
    cells = (
        Cell(clean(spec.name), hint=clean(spec.source)),
        Cell("disk"),
        Cell(show_bytes(spec.size), spec.size) if spec.size else UNKNOWN,
        Cell(state if spec.enabled else "disabled", kind="soft"),
        NOTHING,
        NOTHING,
        importance_cell(spec.importance),
        _keep_cell(spec.keep),
        Cell(owner, kind="soft"),
    )
    return Row(id, cells, (Button("preload", "Preload", why_not),))


def model_kind(lease: Lease) -> str:
    """The backend, the type and the quantization of the model of `lease`, as far as they are known."""
    model_type = "" if lease.model_type == "other" else lease.model_type
    parts = (lease.backend, model_type, lease.quantization)
    return ", ".join(clean(part) for part in parts if part)
