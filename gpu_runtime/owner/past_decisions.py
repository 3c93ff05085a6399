"""The last decisions on a model or a notebook, and the same decisions decided again."""

from __future__ import annotations

from ..errors import AmbiguousName, GpuError, UnknownModel
from ..facts import Event, Replayed, notebook_has_name
from ..units import show_bytes
from . import kernel_names, notebooks, registry
from . import replays as recorded
from .history import recorded_events
from .session import Session

FEW = 8  # events that `why` returns without a name, among the last MOST_RECENT
MOST_RECENT = 500
MOST_OF_ONE = 20  # events that `why` returns about one name


def why(session: Session, name: str, replay: bool) -> tuple[Event | Replayed, ...]:
    """The last decisions on a model, or on the memory of the notebook `name`, the newest first.

    Without a `name`, the last decisions that concern this process. In a terminal, the last ones on
    this host. Raises UnknownModel if there is no decision on `name` and no model has this name, and
    GpuError if no notebook has it. With `replay`, the recorded decisions are made again.
    """
    if replay:
        return _replays(session, name)
    if not name:
        recent = _recent(session)
        mine = [event for event in recent if session.guest or event.owner == session.me]
        return (*_staying(session, session.me), *mine[-FEW:][::-1])
    bare, process = registry.split_address(name)
    resident = registry.by_key(session, bare)
    found = recorded_events(
        session, None if process else MOST_OF_ONE, resident.spec.name if resident else bare
    )
    if process:
        found = _of_process(session, found, process)[-MOST_OF_ONE:]
    if not found and resident is None and session.catalogue.spec(bare) is None:
        found = _on_kernel(session, bare)
    return found[::-1]


def _recent(session: Session) -> list[Event]:
    """The last events. A model that its process releases at its end is no decision.

    With these events, a process that ends with eight models would displace all decisions.
    """
    recent = recorded_events(session, MOST_RECENT)
    return [event for event in recent if event.action != "released"]


def _of_process(session: Session, events: tuple[Event, ...], process: str) -> tuple[Event, ...]:
    """Those of the `events` that the `process` recorded: its notebook, pid or owner's id."""
    sections = session.ledger.read().sections.values()
    owners = {one.owner.id for one in sections if process in one.owner.names}
    owners |= {one.owner for one in events if notebook_has_name(one.notebook, process)}
    return tuple(
        event
        for event in events
        if event.owner in owners or process in (event.owner, event.owner.partition(".")[0])
    )


def _on_kernel(session: Session, who: str) -> tuple[Event, ...]:
    """The last decisions on the kernel `who`; see `kernel_names.find`. Raises UnknownModel, GpuError.

    If the notebook `who` has no kernel now, the result has the decisions on its last kernel.
    """
    of_all = recorded_events(session, model=kernel_names.NAME)
    try:
        owner = kernel_names.find(session, who, leased=False).owner
    except AmbiguousName:
        raise
    except GpuError:
        owners = [one.owner for one in of_all if notebook_has_name(one.notebook, who)]
        if not owners and kernel_names.is_notebook(session, who):
            return _on_models_of(session, who)
        if not owners:
            raise UnknownModel(who, registry.addresses(session)) from None
        owner = owners[-1]
    found = [event for event in of_all if event.owner == owner]
    return (*found[-MOST_OF_ONE:], *_staying(session, owner))


def _staying(session: Session, owner_id: str) -> tuple[Event, ...]:
    """An event for each part of the memory of the process `owner_id` that cannot leave its card now."""
    section = session.ledger.read().sections.get(owner_id)
    if section is None:
        return ()
    now = session.wall()
    return tuple(
        Event(
            seq=0,
            wall=now,
            model=kernel_names.NAME,
            action="stays",
            reason="shared",
            because=f"{show_bytes(one.bytes)} on {one.device}: {one.why}",
            owner=owner_id,
            notebook=section.owner.notebook,
        )
        for one in section.staying
    )


def _on_models_of(session: Session, notebook: str) -> tuple[Event, ...]:
    """The last decisions on the models of the `notebook`. Raises GpuError, AmbiguousName."""
    found = [event for event in _recent(session) if notebook_has_name(event.notebook, notebook)]
    paths = tuple(sorted({event.notebook for event in found}))
    if len(paths) > 1:
        raise AmbiguousName(notebook, paths)
    if not found:
        notebooks.kernels(session, notebook)  # raises GpuError if no notebook has the name
    return tuple(found[-FEW:])


def _replays(session: Session, name: str) -> tuple[Replayed, ...]:
    """Decides the recorded decisions on the model or notebook `name` again; see Runtime.why.

    `name` may be the number of one decision. Raises UnknownModel if no decision is recorded and no
    model has this name, and GpuError if no notebook has it.
    """
    bare, process = registry.split_address(name)
    is_notebook = kernel_names.is_notebook(session, name)
    if is_notebook:
        bare, process = kernel_names.NAME, name
    resident = registry.by_key(session, bare)
    found = recorded.again(session, resident.spec.name if resident else bare, process)
    if not found and is_notebook:
        notebooks.kernels(session, name)  # raises GpuError if no notebook has the name
    elif not found and resident is None and session.catalogue.spec(bare) is None:
        numbers = "No recorded decision has this number. See the numbers:  gpu why NAME --replay"
        advice = numbers if bare.isdecimal() else ""
        raise UnknownModel(bare, registry.addresses(session), advice=advice)
    return found
