"""`who` lists the names that hold device memory in a process. `free` releases such memory.

Nothing is moved or deleted without a request. `free` without a name releases outputs, the last
error's variables, garbage and caches. torch is used only if the user has imported torch.

For `who` of another process, that process lists its variables and this one reads the list. The
request is a ticket, like every request to another process. The list is not in the book, which
everybody reads, but in a file beside the book. The answering process searches in a separate thread
while no cell runs. The search moves no memory: memory that was moved to RAM stays in RAM.
"""

from __future__ import annotations

import difflib
import gc
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from .. import other_libraries
from ..errors import Busy, GpuError
from ..facts import HOST, KERNEL, Book, Holder, Holdings, LeaseId, Outcome, Owner, Staying
from ..names import ELSEWHERE, ERROR, MODEL, OUTPUT, VARIABLE, Name, Namespace, registered
from ..scheduler.recall import Order
from ..units import show_bytes
from . import operations, requests
from .resident import Place, Resident
from .session import Session

SECONDS = 3.0  # a search that takes longer is partial
MOST_REFERRERS = 8  # the most storages without a name for which a referrer is searched


class _Storage(NamedTuple):
    """The device and size of a torch storage. This object keeps no reference to the storage."""

    device: str
    bytes: int
    own_bytes: int  # without the bytes that another storage of the list has in the same memory
    stays: str  # why it cannot leave its device; empty: it can


class _Reached(NamedTuple):
    """A name, and the keys of the storages that can be reached from it.

    `direct` storages are reached without an autograd graph, `saved` storages only through a graph.
    `alone` storages become free if the name is deleted.
    """

    name: Name
    direct: frozenset[int]
    saved: frozenset[int]
    alone: frozenset[int]

    @property
    def every(self) -> frozenset[int]:
        return self.direct | self.saved


def search_here(
    session: Session,
    seconds: float = SECONDS,
    stop: Callable[[], bool] | None = None,
    *,
    namespace: Namespace | None = None,
) -> Holdings:
    """What this process holds on its devices, by name.

    The result is partial if the search takes more than `seconds`, or if `stop()` returns True. `namespace` has the
    names; without it, those of the notebook or script.
    """
    began = time.perf_counter()
    if "torch" not in sys.modules:
        rows = [_of_lease(resident) for resident in _on_devices(session)] + _of_libraries()
        seconds = time.perf_counter() - began
        return _summed(session, rows, {}, set(), set(), 0, True, seconds)
    from ..backends.pytorch.search import optimizer_keys

    limit = _limit(seconds, stop)
    storages, whole = _search(session, limit)
    reached, all_reached = _reach(session, namespace or registered.current, storages.keys(), limit)
    models, governed, of_others = _models(session, storages)
    direct = set(governed)
    saved: set[int] = set()
    for reach in reached:
        direct |= reach.direct
        saved |= reach.saved
    saved -= direct
    left = storages.keys() - direct - saved
    elsewhere, explained = _elsewhere(session, storages, left, limit)
    names = [_row(reach, storages) for reach in reached]
    is_whole = whole and all_reached and not limit.over
    found = _summed(
        session,
        [*models, *names, *elsewhere, *_of_libraries()],
        storages,
        direct | explained,
        saved,
        of_others,
        is_whole,
        limit.elapsed_seconds,
    )
    of_optimizers = sum(storages[key].own_bytes for key in optimizer_keys() & storages.keys())
    return replace(found, optimizer_bytes=of_optimizers)


def of_leases(session: Session) -> Holdings:
    """The device memory of this process by lease: its models, and the memory of its own code.

    No search is made.
    """
    rows = []
    parked = 0
    for resident in list(session.residents.values()):
        lease = resident.lease
        if lease.kind == KERNEL and resident.place is not Place.HERE:
            parked = lease.bytes
        elif resident.place is Place.HERE and lease.kind == KERNEL:
            row = replace(_of_lease(resident), name="its own code", kind=VARIABLE, what="")
            rows.append(replace(row, alone_bytes=0))
        elif lease.kind == "model" and (resident.place is Place.HERE or lease.in_parts):
            rows.append(_of_lease(resident))
    size = sum(row.bytes for row in rows)
    rows.sort(key=lambda row: -row.bytes)
    return Holdings(tuple(rows), size, size, parked_bytes=parked)


def _summed(
    session: Session,
    rows: Iterable[Holder],
    storages: Mapping[int, _Storage],
    explained: Iterable[int],
    saved: Iterable[int],
    of_others: int,
    whole: bool,
    seconds: float,
) -> Holdings:
    """The result of `who`: the sorted rows, and sums.

    The rows are sorted by the bytes that become free if only the row's name is deleted. `explained`
    and `saved` are keys of `storages`: the storages whose holder is known, and those that only
    autograd graphs hold. `of_others` are the bytes of models whose storages are not in this
    process.
    """
    known_bytes = sum(storages[key].own_bytes for key in explained) + of_others
    graph_bytes = sum(storages[key].own_bytes for key in saved)
    found_bytes = sum(storage.own_bytes for storage in storages.values())
    unknown_bytes = found_bytes + of_others - known_bytes - graph_bytes
    allocated, reserved = _allocated(session)
    # A simulated card does not count the user's tensors as allocated, so the figure is unknown there.
    unseen_bytes = 0 if session.probe.simulated else max(0, allocated - found_bytes)
    cached_bytes = 0 if session.probe.simulated else max(0, reserved - allocated)
    parts = (known_bytes, graph_bytes, cached_bytes, unknown_bytes, unseen_bytes)
    ordered = sorted(rows, key=lambda row: (-row.alone_bytes, -row.bytes, row.name))
    return Holdings(
        tuple(ordered),
        sum(parts),
        *parts,
        whole=whole,
        seconds=round(seconds, 3),
        staying=Staying.of(storages.values()),
    )


def _search(session: Session, limit: Any) -> tuple[dict[int, _Storage], bool]:
    """The storages on the governed devices by their keys, and whether the search was complete."""
    result = _found(session, limit)
    found = {
        entry.key: _Storage(entry.device, entry.bytes, entry.own_bytes, entry.stays)
        for entry in result.found
    }
    return found, result.whole


def _found(session: Session, limit: Any) -> Any:
    """The result of the search for storages, without models that are away from their devices.

    On simulated cards, tensors in our pages of host memory are no device memory: copies of models
    on a card, and bytes that are just leaving one. The parked storages of a kernel are found.
    """
    from ..backends.pytorch.search import FOREIGN, UNREADABLE, counted_on, search
    from ..backends.pytorch.shadows import every_key

    memories = [session.probe.place(device.id) for device in session.probe.devices]
    host = session.probe.place(HOST)
    ours = {key.untyped_storage()._cdata for key in every_key()}
    parked = _parked_keys(session)
    of_models: set[int] = set()  # a model that is on its device leaves by the rules of its backend
    for resident in list(session.residents.values()):
        if resident.place is not Place.HERE:
            ours |= _keys_of(resident)
        of_models |= _keys_of(resident)
    result = search(counted_on(memories), governed=frozenset(ours), limit=limit)
    found = []
    for entry in result.found:
        if entry.key in parked or entry.key in of_models:
            found.append(entry._replace(stays=""))
            continue
        is_guard = entry.stays == UNREADABLE and session.probe.simulated
        in_host = entry.stays == FOREIGN and host.region_at(entry.storage.data_ptr())
        if not (is_guard or in_host):
            found.append(entry)
    return result._replace(found=tuple(found))


def names_of(session: Session, keys: frozenset[int]) -> str:
    """The variables of this notebook that reach the storages `keys`, as text."""
    reached, _ = _reach(session, registered.current, keys, _limit())
    names = [reach.name.name for reach in reached if reach.name.kind == VARIABLE]
    return listed(names) if names else "what no variable refers to"


def _limit(seconds: float | None = SECONDS, stop: Callable[[], bool] | None = None) -> Any:
    """A limit of a search from now on; see `search.Limit`, whose module imports torch."""
    from ..backends.pytorch.search import Limit

    return Limit(seconds, stop=stop)


def _parked_keys(session: Session) -> frozenset[int]:
    """The keys of the storages whose bytes are parked in host memory."""
    kernel = session.residents.get(KERNEL)
    return frozenset(
        [away.storage._cdata for away in getattr(kernel and kernel.handle, "away", ())]
    )


def _reach(
    session: Session, namespace: Namespace, keys: Iterable[int], limit: Any
) -> tuple[list[_Reached], bool]:
    """The names that reach any of the storages `keys`, and whether the search was complete."""
    from ..backends.pytorch.holders import Graphs, reached

    wanted = frozenset(keys)
    found: list[_Reached] = []
    whole = True
    graphs = Graphs(limit)
    ours = (session, session.residents, sys.modules, *session.residents.values())
    shared = {id(value) for value in (*namespace.shared(), *ours)}
    parked = _parked_keys(session)
    for name in namespace.names():
        emptied = {id(value) for value in namespace.emptied(name)}
        hidden = shared | emptied
        reach = reached(namespace.held(name), graphs, shared=hidden, parked=parked, limit=limit)
        whole = whole and reach.whole
        part = _Reached(name, reach.direct & wanted, reach.saved & wanted, reach.alone & wanted)
        if part.every:
            found.append(part)
    return found, whole


def _row(reached: _Reached, storages: Mapping[int, _Storage]) -> Holder:
    name, kind, what, cell = reached.name
    held = [storages[key] for key in reached.every]
    alone = [storages[key] for key in reached.alone]
    return Holder(
        name,
        kind,
        _devices(storage.device for storage in held),
        sum(storage.bytes for storage in held),
        sum(storage.bytes for storage in alone),
        cell,
        what,
        *_why_it_stays(held),
    )


def _why_it_stays(held: Iterable[_Storage]) -> tuple[str, int]:
    """The reasons why some of the storages `held` stay, and their bytes."""
    staying = [storage for storage in held if storage.stays]
    whys = dict.fromkeys(storage.stays for storage in staying)
    return "; ".join(whys), sum(storage.own_bytes for storage in staying)


def _devices(ids: Iterable[str]) -> str:
    """The device `ids` as one word, such as `cuda:0,1`."""
    first, *others = sorted(set(ids)) or [""]
    numbers = [id.partition(":")[2] for id in others]
    return ",".join([first, *numbers])


# -- governed models -------------------------------------------------------------------------------


def _on_devices(session: Session) -> list[Resident]:
    """The governed models that are on a device, without the kernel's own lease.

    The memory of the kernel's lease is explained by other rows: the user's variables.
    """
    found: list[Resident] = []
    for resident in list(session.residents.values()):
        is_here = resident.place is Place.HERE or resident.lease.in_parts
        if is_here and resident.lease.kind == "model":
            found.append(resident)
    return found


def _of_lease(resident: Resident, device: str = "", size: int | None = None) -> Holder:
    """The row of a governed model.

    In the row, all bytes of the model become free: `%gpu evict` moves the whole model, whatever
    names refer to it.
    """
    name = resident.spec.name
    shares = [share for share in resident.lease.shares if share.device != HOST]
    held = sum(share.bytes for share in shares) if size is None else size
    device = device or _devices(share.device for share in shares)
    return Holder(name, MODEL, device, held, held, what=f"%gpu evict {shlex.quote(name)}")


def _models(
    session: Session, storages: Mapping[int, _Storage]
) -> tuple[list[Holder], frozenset[int], int]:
    """The rows of the governed models, the keys of their storages, and the bytes elsewhere.

    The bytes elsewhere belong to governed models whose storages are in another process.
    """
    rows: list[Holder] = []
    governed: set[int] = set()
    of_others = 0
    for resident in _on_devices(session):
        keys = _keys_of(resident) & storages.keys()
        if keys:
            held = [storages[key] for key in keys]
            device = _devices(storage.device for storage in held)
            row = _of_lease(resident, device, sum(storage.bytes for storage in held))
            governed |= keys
        else:
            row = _of_lease(resident)
            of_others += row.bytes
        rows.append(row)
    return rows, frozenset(governed), of_others


# -- what no name reaches --------------------------------------------------------------------------


def _elsewhere(
    session: Session, storages: Mapping[int, _Storage], left: Iterable[int], limit: Any
) -> tuple[list[Holder], frozenset[int]]:
    """One row for each object that refers to some of the `storages` with the keys `left`.

    The storages without a known referrer share one row. Also returns the keys of the storages whose
    referrer is known.
    """
    from ..backends.pytorch.holders import UNKNOWN, referrer

    wanted = frozenset(left)
    if not wanted or limit.over:
        return [], frozenset()
    found = [entry for entry in _found(session, limit).found if entry.key in wanted]
    found.sort(key=lambda entry: -entry.bytes)
    referred: dict[str, list[_Storage]] = {}  # by the name of the referrer
    known = set()
    for number, entry in enumerate(found):
        said = referrer(entry, {id(found)}, limit) if number < MOST_REFERRERS else UNKNOWN
        if said != UNKNOWN:
            known.add(entry.key)
        referred.setdefault(said, []).append(storages[entry.key])
    rows = []
    for said, held in referred.items():
        devices, size = _devices(storage.device for storage in held), sum(one.bytes for one in held)
        what = "no variable refers to it"
        rows.append(Holder(said, ELSEWHERE, devices, size, 0, "", what, *_why_it_stays(held)))
    return rows, frozenset(known)


def _of_libraries() -> list[Holder]:
    """What other libraries hold on the cards. torch does not count it, so no sum has it."""
    return [
        Holder(
            held.library,
            ELSEWHERE,
            held.device,
            held.bytes,
            0,
            "",
            held.what,
            "not of torch",
            held.bytes,
        )
        for held in other_libraries.held()
    ]


# -- free ------------------------------------------------------------------------------------------


def free(session: Session, variable: str | None) -> Outcome:
    """Deletes `variable`; if it is None, releases outputs, the last error, garbage and caches.

    Raises GpuError if there is no variable with the name `variable`.
    """
    namespace = registered.current
    known = namespace.variables()
    if variable is not None and variable not in known:
        close = difflib.get_close_matches(variable, known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        if variable in session.residents:
            hint = f" It is a model:  %gpu evict {variable}\n "
        raise GpuError(
            f"no variable is called {variable!r}.{hint} Those that hold memory:  %gpu who",
            name=variable,
        )
    began = time.perf_counter()
    if variable is None:
        before = _held_bytes(session)
        gc.collect()  # first: old garbage and cached blocks must not count as what is released
        session.probe.empty_cache()
        between = _held_bytes(session)
        said = _release(session, namespace)
        gc.collect()
    else:
        gc.collect()  # first: older garbage and cached blocks must not count as the variable's
        session.probe.empty_cache()
        before = _held_bytes(session)
        said = _delete(session, namespace, variable)
    if session.kernel is not None:
        session.kernel.forget_deleted()
    session.probe.empty_cache()
    freed = max(0, before - _held_bytes(session))
    if session.kernel is not None:
        session.kernel.recount()
    session.maps.publish(at_once=True)
    if variable is None:
        garbage = max(0, before - between)
        said = _figures(said, garbage, freed - garbage)
    because = "; ".join([f"{show_bytes(freed)} came free", *said])
    requests.note_action(session, "free", "", because, freed)
    seconds = round(time.perf_counter() - began, 3)
    return Outcome("free", variable or "", True, because, freed, seconds=seconds)


def _release(session: Session, namespace: Namespace) -> list[str]:
    """Releases outputs and the last error's variables, if they hold device memory.

    Returns sentences on what was released.
    """
    reached = _named(session, namespace)
    outputs = [reach.name for reach in reached if reach.name.kind == OUTPUT]
    errors = [reach.name for reach in reached if reach.name.kind == ERROR]
    namespace.release([*outputs, *errors])
    said = []
    if outputs:
        said.append(f"released {listed([name.name for name in outputs])}")
    if errors:
        said.append("cleared the variables of the last error (%debug shows them no more)")
    return said


def _figures(said: list[str], garbage_bytes: int, released_bytes: int) -> list[str]:
    """The sentences `said` on what was released, with its bytes, and the bytes of garbage and of unused cache."""
    if said and garbage_bytes:
        said[0] += f" ({show_bytes(max(0, released_bytes))})"
    if said and garbage_bytes + released_bytes <= 0:
        said.append("variables still refer to their memory")
    return (
        [*said, f"{show_bytes(garbage_bytes)} was garbage or unused cache"]
        if garbage_bytes
        else said
    )


def _delete(session: Session, namespace: Namespace, variable: str) -> list[str]:
    """Deletes a variable. Returns sentences on the names that still refer to the same memory."""
    keys_of = {reach.name.name: reach.every for reach in _named(session, namespace)}
    mine = keys_of.pop(variable, frozenset())
    others = {name: keys & mine for name, keys in keys_of.items()}
    models: list[Resident] = []
    if mine:
        models = [resident for resident in _on_devices(session) if mine & _keys_of(resident)]
    namespace.delete(variable)
    gc.collect()
    if session.kernel is not None:
        session.kernel.forget_deleted()
    kept = _search(session, _limit())[0].keys() if mine else frozenset()
    left = {name.name for name in namespace.names()}
    names = [name for name, keys in others.items() if keys & kept and name in left]
    names += [f"the model {model.spec.name}" for model in models]
    if not names:
        return []
    verb = "refers" if len(names) == 1 else "refer"
    return [f"{listed(names)} still {verb} to its memory"]


def _named(session: Session, namespace: Namespace) -> list[_Reached]:
    """The names that reach device memory. There are none before torch is imported."""
    if "torch" not in sys.modules:
        return []
    limit = _limit()
    return _reach(session, namespace, _search(session, limit)[0], limit)[0]


def _keys_of(resident: Resident) -> frozenset[int]:
    from ..backends.pytorch.holders import storages_of

    return storages_of(resident.handle)


def listed(names: list[str]) -> str:
    """The `names` as text such as `a, b and c`. Of more than six names, five are shown."""
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} more"]
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _held_bytes(session: Session) -> int:
    """This process's device memory: what its allocators reserve.

    No allocator counts the tensors on simulated cards, so this function searches the tensors there.
    """
    if not session.probe.simulated or "torch" not in sys.modules:
        return _allocated(session)[1]
    found, _ = _search(session, _limit(None))
    *_, of_others = _models(session, found)
    return of_others + sum(storage.own_bytes for storage in found.values())


def _allocated(session: Session) -> tuple[int, int]:
    """The allocated bytes and the reserved bytes of this process's allocators on all cards."""
    allocated = reserved = 0
    for map in session.probe.maps():
        if map.device != HOST:
            allocated += map.allocated_bytes
            reserved += map.reserved_bytes
    return allocated, reserved


# -- `who` by name, here or in another process

ANSWER_SECONDS = 10.0  # the longest wait for an answer; the search itself takes 3 s at most
MOST_ROWS = 30
MOST_LETTERS = 80  # in a name, and in its description
BUSY = "A cell runs there: variables are listed between two cells."
SCRIPT = "It is no notebook, so its variables are not listed."
HIDDEN = "Names are shown to {user} only (GPU_WHO_NAMES)."


# -- the asking side -------------------------------------------------------------------------------


def who(session: Session, process: str, seconds: float = ANSWER_SECONDS) -> Holdings:
    """The device memory that `process` holds, listed by the names of its variables.

    `process` is a notebook's file name, a process id or an owner's id; empty: this process. Waits
    `seconds` at most. Raises GpuError, NotAllowed, Busy.
    """
    if session.guest and not process:
        raise GpuError("a command holds no memory. Name a notebook or a process:  gpu who NOTEBOOK")
    if not process:
        return own_holders(session)
    book = session.ledger.read()
    owner = operations.owner_named(book, process)
    if owner.id == session.me:
        in_cell = threading.current_thread() is threading.main_thread()
        return own_holders(session) if in_cell else _listed_for_others(session)
    _require_running(session, book, owner)
    try:
        operations.ask_owner(session, "who", LeaseId(owner.id, ""), seconds)
    except Busy as error:
        _require_running(session, book, owner)  # it may have been stopped meanwhile
        raise Busy(
            f"{owner.label} has not answered for {seconds:.0f} s. Its interpreter is blocked, or its "
            "version of gpu-console is too old to answer.",
            name="",
            waited_seconds=seconds,
            because=str(error),
        ) from None
    answer = session.ledger.answer(owner.id)
    if answer is None:
        raise GpuError(f"{owner.label} answered, but its answer cannot be read from here.")
    return replace(answer, process=owner.label)


def _require_running(session: Session, book: Book, owner: Owner) -> None:
    """Raises GpuError if the process of `owner` is stopped."""
    if operations.is_stopped(session, book, owner.id):
        raise GpuError(
            f"{owner.label} is stopped, so it cannot answer.\n"
            f"  Let it continue:  kill -CONT {owner.pid}",
            process=owner.label,
        )


# -- the answering side ----------------------------------------------------------------------------


def answer(session: Session, order: Order) -> Outcome:
    """Lists what this process holds, for the owner that wrote `order`. Raises OSError."""
    mine = session.ledger.owner.user
    own_user = order.by in ("", mine)
    found = _listed_for_others(session)
    if not own_user and session.settings.gpu_who_names != "all":
        found = _without_names(found, mine)
    found = _shortened(found)
    session.ledger.publish_answer(order.asker, found, private=own_user)
    because = f"{show_bytes(found.held_bytes)} on devices, {show_bytes(found.parked_bytes)} parked"
    return Outcome(verb="who", name="", done=True, because=because, bytes=0)


def _listed_for_others(session: Session) -> Holdings:
    """The memory of this process: by variable in a kernel that runs no cell, else by lease."""
    activity = session.activity
    if not activity.state.idle_since:
        return replace(of_leases(session), note=BUSY if activity.running else SCRIPT)
    found = own_holders(session, stop=lambda: activity.running)
    kernel = session.residents.get(KERNEL)
    if kernel is None or kernel.place is not Place.HERE:
        return found
    return replace(found, stays=_why_not_parked(kernel))


def own_holders(session: Session, stop: Callable[[], bool] | None = None) -> Holdings:
    """What this process holds, by name, also while its kernel is parked.

    The search ends early once `stop` returns True.
    """
    found = search_here(session, stop=stop)
    kernel = session.residents.get(KERNEL)
    if kernel is None or kernel.place is Place.HERE:
        return found
    rows = []
    for row in found.holders:
        is_parked = row.kind != MODEL and not row.stays
        rows.append(replace(row, device=HOST) if is_parked else row)
    size = kernel.lease.bytes
    return replace(
        found,
        holders=tuple(rows),
        held_bytes=max(0, found.held_bytes - size),
        explained_bytes=max(0, found.explained_bytes - size),
        parked_bytes=size,
    )


def _why_not_parked(kernel: Resident) -> str:
    """The reason why an idle kernel cannot be parked now; empty if the kernel can be parked."""
    if not kernel.lease.movable and not kernel.lease.fixed:
        return "it is exempt from parking (%gpu park never, or GPU_PARK=never)"
    return kernel.handle.why_not()


def _without_names(found: Holdings, user: str) -> Holdings:
    """The table `found` without the names of variables, for another user who reads it.

    The names of models stay, because the book shows them to every user.
    """
    rows = []
    for row in found.holders:
        if row.kind != MODEL:
            row = replace(row, name="–", cell="", what="")
        rows.append(row)
    note = " ".join(filter(None, [found.note, HIDDEN.format(user=user)]))
    return replace(found, holders=tuple(rows), note=note)


def _shortened(found: Holdings) -> Holdings:
    """The first rows of the table `found`, and the number and bytes of the omitted rows."""
    rows = [
        replace(row, name=row.name[:MOST_LETTERS], what=row.what[:MOST_LETTERS])
        for row in found.holders[:MOST_ROWS]
    ]
    others = found.holders[MOST_ROWS:]
    size = sum(row.bytes for row in others)
    return replace(found, holders=tuple(rows), left_out=len(others), left_out_bytes=size)
