"""The verbs on models: preload, move, evict, pin, unpin.

A verb on a model of another owner becomes a request to the model's owner.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from .. import threads
from ..backends.base import Progress
from ..backends.formats import sources
from ..errors import Busy, GpuError, NotAllowed, StillInUse
from ..facts import (
    KERNEL,
    Evidence,
    Grant,
    Lease,
    LeaseId,
    Move,
    Outcome,
    Refuse,
    Wait,
    lease_title,
)
from ..scheduler.recall import DISK
from ..units import parse_seconds, show_bytes, show_seconds
from . import (
    acquire,
    interrupts,
    kernel_names,
    migrate,
    permissions,
    registry,
    release,
    requests,
    stopped,
)
from .resident import Place, Resident
from .session import Session, log

ASK_SECONDS = 30.0  # default time-out for a request to another owner


def preload(
    session: Session,
    name: str | LeaseId,
    *,
    progress: Progress | None = None,
    timeout: str | float | None = None,
    wait: bool = True,
) -> Outcome:
    """Brings a model onto its device; see Runtime.preload."""
    if not isinstance(name, LeaseId) and not session.guest:
        if registry.by_key(session, name) is None and session.catalogue.spec(name):
            # A model of the catalogue counts as registered in this process.
            name = registry.find(session, name).spec.name
    target = kernel_names.resolve(session, name, loadable=True)
    if target.owner != session.me:
        return ask_owner(session, "preload", target, timeout, wait)
    resident = registry.find(session, target.name)
    began = session.clock()
    already = resident.place is Place.HERE
    if not (wait or already):
        return _preload_later(session, resident, timeout)
    if already:
        session.look_ahead.requested(target.name)
    else:
        acquire.obtain(session, resident, None, timeout=timeout, progress=progress, with_load=True)
    lease = resident.lease
    title = lease_title(lease, session.owner)
    because = f"{title} is on {lease.where}" + (" already" if already else "")
    loaded_bytes = 0 if already else lease.bytes
    requests.note_action(session, "preload", target.name, because, loaded_bytes)
    seconds = session.clock() - began
    return Outcome(
        verb="preload",
        name=title,
        done=True,
        because=because,
        bytes=loaded_bytes,
        where=lease.where,
        seconds=seconds,
    )


def load_wished(session: Session, name: str, timeout: float) -> str:
    """Loads a model that the fleet wishes on this host, and returns the model's devices.

    Models that are wished as much stay. `timeout` (seconds) limits the wait for room; the load may
    take longer. Raises the errors of `use`.
    """
    resident = registry.find(session, name)
    if resident.place is not Place.HERE:
        acquire.obtain(session, resident, None, timeout=timeout, for_wish=True)
    return resident.lease.where


def source_facts(session: Session, name: str) -> tuple[Evidence, str]:
    """What the source of a model shows about it, and its chat template; see Runtime._source_facts."""
    resident = registry.find(session, name)
    spec = resident.spec
    template = ""
    if spec.source:
        template = sources.template(spec.source, spec.name, spec.options.get("revision")) or ""
    try:
        return resident.backend.evidence(spec, resident.origin), template
    except (GpuError, OSError) as error:  # a load reports it
        return Evidence(why_unknown=str(error)), template


def move(
    session: Session,
    name: str | LeaseId,
    device: str | Iterable[str],
    *,
    timeout: str | float | None,
) -> Outcome:
    """Moves an idle model to other cards; see Runtime.move."""
    target = kernel_names.resolve(session, name)
    kernel_names.require_model(session, "move", name, target)
    cards = migrate.cards(session, target.name, device)
    if target.owner != session.me:
        return ask_owner(session, "move", target, timeout, places=cards)
    resident = registry.find(session, target.name)
    return migrate.move(session, resident, cards, by=requests.person(session))


def _preload_later(session: Session, resident: Resident, timeout: str | float | None) -> Outcome:
    name = resident.spec.name

    def load() -> None:
        """Loads the model. No caller waits for the result, so an error is logged."""
        try:
            acquire.obtain(session, resident, None, timeout=timeout, with_load=True)
        except GpuError as error:
            log.warning("%s was not preloaded: %s", name, error)

    threads.start(load)
    return Outcome(
        verb="preload",
        name=name,
        done=False,
        because=f"{name} is loaded in the background",
        where="",
    )


def evict(
    session: Session,
    name: str | LeaseId,
    *,
    timeout: str | float | None,
    wait: bool = True,
    drop: bool = False,
) -> Outcome:
    """Evicts a model; see Runtime.evict."""
    target = registry.resolve(session, name)
    if target.owner != session.me:
        places = (DISK,) if drop else ()
        return ask_owner(session, "evict", target, timeout, wait, places=places)
    resident = registry.find(session, target.name)
    began = session.clock()
    title = lease_title(resident.lease, session.owner)
    because = f"{title} was evicted by hand."
    with resident.training.waived():
        drops = drop and resident.lease.droppable
        step = release.evict(session, resident, because, drop=drops, by=requests.person(session))
    if step is None:
        where = "host" if resident.place is Place.AWAY else "disk"
        return Outcome(
            verb="evict",
            name=title,
            done=True,
            because=f"{title} is on no device",
            bytes=0,
            where=where,
        )
    freed = sum(share.bytes for share in step.source)
    where = "host" if isinstance(step, Move) else "disk"
    if resident.lease.kind == KERNEL and resident.lease.on_host:
        freed = resident.lease.bytes  # it may have taken more since it was counted
    moved = "was offloaded to host memory" if where == "host" else "was unloaded"
    because = f"{title} {moved}; {show_bytes(freed)} came free"
    return Outcome(
        verb="evict",
        name=title,
        done=True,
        because=because,
        bytes=freed,
        where=where,
        seconds=session.clock() - began,
    )


def set_keep(session: Session, name: str | LeaseId, verb: str) -> Outcome:
    """Keeps a model on its device if `verb` is "pin"; allows its eviction if `verb` is "unpin"."""
    target = kernel_names.resolve(session, name, loadable=True)
    kernel_names.require_model(session, verb, name, target)
    if target.owner != session.me:
        return ask_owner(session, verb, target, ASK_SECONDS)
    resident = registry.find(session, target.name)
    keep = verb == "pin"
    permissions.require_within_cap(session, target.name, resident.spec.importance, keep)
    resident.spec = replace(resident.spec, keep=keep)
    resident.lease = replace(resident.lease, keep=keep)
    session.publish()
    because = _keep_sentence(resident, keep)
    requests.note_action(session, verb, target.name, because)
    where = resident.lease.where if resident.handle is not None else "disk"
    return Outcome(
        verb=verb,
        name=target.name,
        done=True,
        because=because,
        bytes=0,
        where=where,
    )


def _keep_sentence(resident: Resident, keep: bool) -> str:
    name = resident.spec.name
    if not keep:
        return f"{name} may be evicted again"
    if resident.place is Place.HERE:
        return f"{name} is kept on its device"
    return f"{name} is kept on its device once it is there; it is {resident.place.value} now"


def ask_owner(
    session: Session,
    verb: str,
    target: LeaseId,
    timeout: str | float | None,
    wait: bool = True,
    must: bool = True,
    places: tuple[str, ...] = (),
) -> Outcome:
    """Requests `verb` from the owner of `target`, and returns the outcome.

    `places` are the cards for a move. For an eviction, the place DISK means that the bytes are
    dropped. If `wait` is false, the function does not wait for the owner's answer.

    If `must` is true, a refusal or a time-out raises NotAllowed, StillInUse, Busy or GpuError. If
    `must` is false, the function returns an Outcome that is not done. A request that this user may
    not make always raises NotAllowed.
    """
    book = session.ledger.read()
    owner = book.owner(target.owner)
    if because := permissions.refusal_of_request(session, verb, owner, target.name):
        requests.decline(session, verb, target, because)
        raise NotAllowed(f"{because}.", name=target.name, because=because, user=session.owner.user)
    session.start_monitor()
    before = book.lease(target.owner, target.name)
    title = lease_title(before, owner) if before else target.name
    seconds = None if timeout is None else parse_seconds(timeout)
    with interrupts.in_one_line(session, lambda: "the request was withdrawn"):
        verdict = requests.request(session, verb, target, timeout=seconds, wait=wait, places=places)
    if isinstance(verdict, Grant):
        where = verdict.lease.where if verdict.lease.shares else ""
        return Outcome(
            verb=verb,
            name=title,
            done=True,
            because=verdict.because,
            bytes=_moved_bytes(verb, before, verdict),
            where=where,
        )
    if must and isinstance(verdict, Refuse):
        raise _refused(session, target, verdict)
    if must and wait and isinstance(verdict, Wait):
        raise _unanswered(target, verdict, seconds)
    return Outcome(
        verb=verb,
        name=title,
        done=False,
        because=verdict.because,
    )


def _moved_bytes(verb: str, before: Lease | None, done: Grant) -> int:
    """The bytes that the request `verb` has moved, of a lease that was as `before`.

    `done` has bytes only if the owner answered the request. It may also follow from the state of
    the lease: the model is where the request wants it.
    """
    if verb not in ("preload", "move", "evict"):
        return done.bytes
    if before is not None and before.shares == done.lease.shares:
        return 0
    if verb == "evict":
        return before.bytes if before else done.bytes
    return done.bytes or done.lease.bytes


def _refused(session: Session, target: LeaseId, verdict: Refuse) -> GpuError:
    because = verdict.because.rstrip(".") + "."
    if verdict.kind in ("in use", "kept"):
        because += stopped.hint(session, target.owner)
        return StillInUse(because, name=target.name, lease=str(target), owner=target.owner)
    return GpuError(because, name=target.name)


def _unanswered(target: LeaseId, verdict: Wait, seconds: float | None) -> Busy:
    facts = {"name": target.name, "waited_seconds": seconds, "because": verdict.because}
    if not verdict.silent:  # the owner has begun, and says what it waits for
        because = f"not done within {show_seconds(seconds or 0)}: {verdict.because.rstrip('.')}"
        return Busy(f"{because}.\n  Watch:  %gpu status", **facts)
    # The sentences after the first one describe the process, for example that it is stopped.
    asked, dot, rest = verdict.because.partition(". ")
    about = f" {rest.rstrip('.')}." if dot else ""
    advice = "It answers once its kernel runs again."
    # This is no silence yet: a healthy process may need so long.
    if not dot and (seconds or 0) < requests.OWNER_SECONDS:
        advice = f"An answer may take up to {requests.OWNER_SECONDS:.0f} s."
    return Busy(
        f"{asked}, and has not answered for {show_seconds(seconds or 0)}.{about}\n"
        f"  {advice} Watch:  %gpu status",
        **facts,
    )
