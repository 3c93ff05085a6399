"""The models that this process knows by name, and the lease that a name refers to.

A person also names the memory of a notebook's own code, by the notebook or its process.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from ..arguments import KEYWORDS, read_keywords, read_options, unknown_option
from ..backends.engines.recipe import group_flags
from ..backends.registry import backend_for
from ..catalog.fields import is_trust, require_loadable
from ..errors import (
    AlreadyRegistered,
    AmbiguousName,
    BadSetting,
    CannotGovern,
    GpuError,
    NotLoaded,
    UnknownDevice,
    UnknownModel,
)
from ..facts import (
    ENGINES,
    KERNEL,
    Book,
    Lease,
    LeaseId,
    ModelSpec,
    Outcome,
    Owner,
    Phase,
    notebook_has_name,
    of_notebook,
)
from ..notebook import variables
from ..safe_text import listed, nearest
from ..scheduler import refusals
from ..scheduler.placement import check_layout
from ..threads import imported, uninterrupted
from ..units import show_bytes, show_seconds
from . import acquire, arrivals, disk, failures, release, requests
from .pins import release_calls, watch_zero_grad
from .resident import Place, Resident
from .session import Session

OF_A_MODULE = ("importance", "keep", "keep_alive", "model_type")  # keywords of `adopt`

# -- registering


def specified(
    session: Session, name: str, source: Any, given: Mapping[str, Any]
) -> tuple[ModelSpec, Any]:
    """The model's specification, and its factory or None.

    `given` are keywords of `register` and options of the model's backend, in one dictionary. A
    missing keyword has its default.
    """
    made = read_keywords(given)
    made["backend"] = backend = backend_for(source, made["backend"])
    made["source"] = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    made["layout"] = check_layout(made["layout"])
    made["devices"] = _known_devices(session, made["devices"])
    made["options"] = _with_defaults(session, backend, read_options(backend, given))
    is_factory = callable(source) and not made["source"]
    return ModelSpec(name, **made), source if is_factory else None


def register(
    session: Session, name: str, source: Any, given: dict[str, Any], restore_on_call: bool
) -> ModelSpec:
    """Makes a model known by name; see Runtime.register and `specified`."""
    spec, factory = specified(session, name, source, given)
    known = session.residents.get(name)
    if known is not None:
        if known.spec == spec and same_code(known.origin, factory):
            return spec
        if known.catalogued is None or known.place is not Place.GONE:
            raise AlreadyRegistered(name)
        # The known model is from the catalogue and not loaded, so the registration replaces it.
        session.residents.pop(name, None)
    resident = new_resident(session, spec, factory, restore_on_call)
    resident.footprint()  # a source that cannot be loaded raises now, not at the first use
    return _add(session, resident)


def _with_defaults(session: Session, backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the `options`, completed with the settings that apply to `backend`."""
    settings = session.settings
    if not settings.gpu_trust_remote_code:
        _require_no_trust(options)
    is_layered = backend == "llama_cpp" or (backend in ENGINES and ENGINES[backend].layered)
    if settings.inference_gpu_layers is not None and is_layered:
        options.setdefault("gpu_layers", settings.inference_gpu_layers)
    if settings.gpu_trust_remote_code and backend == "transformers":
        options.setdefault("trust_remote_code", True)
    return options


def _require_no_trust(options: dict[str, Any]) -> None:
    """Raises BadSetting if the `options` let the code of a model's directory run."""
    instead = (
        "left out, because the model's own code would run with your rights.\n"
        "  Read that code. To let it run:  GPU_TRUST_REMOTE_CODE=true, before the start of this process"
    )
    if options.get("trust_remote_code"):
        raise BadSetting("trust_remote_code", True, instead)
    for flag, _, _ in group_flags(tuple(map(str, options.get("runtime_args") or ()))):
        if is_trust(flag):
            raise BadSetting("runtime_args", flag, instead)


def adopted_with(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `adopt` in `given`, which are the keywords and options of `register`.

    `adopt` takes a module as it is and where it is. So the other keywords must have their defaults,
    and `backend` must be "auto" or "torch". Raises BadSetting.
    """
    known = (*OF_A_MODULE, "optimizer")
    for name, value in given.items():
        if name not in known and name not in KEYWORDS:
            near = ("optimizer", *KEYWORDS, "restore_on_call")
            raise unknown_option(name, value, near, "a module")
    for name in ("size", "quantization", "devices", "backend", "layout"):
        value = given[name]
        if value and value != KEYWORDS[name] and (name, value) != ("backend", "torch"):
            raise BadSetting(name, value, "left out: a module is governed as it is, where it is")
    return {name: given[name] for name in known if name in given}


def adopt(
    session: Session,
    name: str,
    module: Any,
    optimizer: Any,
    given: dict[str, Any],
    restore_on_call: bool,
) -> ModelSpec:
    """Governs a module that the user has already created; see Runtime.adopt."""
    if not is_module(module):
        kind = type(module).__name__
        raise CannotGovern(
            f"{name!r} cannot be governed: a {kind} is no torch.nn.Module.", name=name, why=kind
        )
    known = session.residents.get(name)
    if known is not None:
        if known.value is module:
            return known.spec
        raise AlreadyRegistered(name)
    _require_new(session, name, module)
    spec = ModelSpec(name, **{**read_keywords(given), "backend": "torch"})
    requests.require_within_cap(session, name, spec.importance, spec.keep)
    resident = new_resident(session, spec, None, restore_on_call)
    _install_adopted(session, resident, module, optimizer)
    spec = _add(session, resident)
    lease = resident.lease
    because = f"{name} is governed where it is, on {lease.where}."
    session.note(lease, "adopted", "request", because, size=lease.bytes)
    return spec


def _require_new(session: Session, name: str, module: Any) -> None:
    """Raises CannotGovern if the module is governed under another name."""
    for other in list(session.residents.values()):
        if other.value is module:
            raise CannotGovern(
                f"this module is governed already, as {other.spec.name!r}; its bytes would count "
                f"twice.",
                name=name,
                why=f"it is {other.spec.name}",
            )


def _install_adopted(session: Session, resident: Resident, module: Any, optimizer: Any) -> None:
    spec = resident.spec
    handle = resident.backend.adopt(spec, module, optimizer)  # type: ignore[attr-defined]
    now = session.clock()
    lease = replace(
        resident.lease,
        shares=resident.backend.measure(handle),
        settled_at=now,
        last_used=now,
        importance=spec.importance,
        keep=spec.keep,
        keep_alive=spec.keep_alive,
        backend="torch",
        model_type=spec.model_type,
    )
    resident.install(handle, lease, None)
    if optimizer is not None:
        watch_zero_grad(optimizer, resident)


def new_resident(session: Session, spec: ModelSpec, origin: Any, restore_on_call: bool) -> Resident:
    """A resident for a model that is not loaded. The caller adds it to the session's residents.

    `origin` is the factory with which the model was registered, or None.
    """
    backend = session.backend(spec.backend)
    resident = Resident(spec, backend, session.me, session.clock, origin, session.wall)
    resident.others = lambda: list(session.residents.values())
    resident.calling = lambda: acquire.call(session, resident, restore_on_call)
    resident.report_loss = lambda kind, because: failures.record_loss(
        session, resident, kind, because
    )
    resident.footprint = lambda: session.sizing.footprint(
        resident, acquire.allowed_devices(session, resident)
    )
    resident.with_disk = partial(disk.with_disk, session, resident)
    return resident


def _add(session: Session, resident: Resident) -> ModelSpec:
    with session.lock:
        if resident.spec.name in session.residents:
            raise AlreadyRegistered(resident.spec.name)
        session.residents[resident.spec.name] = resident
    session.start_monitor()
    session.look_ahead.start()
    session.announce(resident.spec.name)  # from now on other owners can request it by name
    return resident.spec


def forget(session: Session, name: str) -> None:
    """Frees a model's memory and its name; see Runtime.forget."""
    resident = find(session, name)
    arrivals.end_load(session, resident.spec.name, "it was forgotten meanwhile")
    lease = resident.truth()
    if not resident.begin_forgetting():
        book, world = session.look()
        lease = book.lease(session.me, resident.spec.name) or resident.lease
        raise refusals.still_here(book, session.me, lease, "in use", world)

    def work() -> None:
        release_calls(resident.value)
        try:
            resident.forget()
        finally:  # a drop with an error is a drop
            session.residents.pop(resident.spec.name, None)
            for other in list(session.residents.values()):
                other.take_over()
            session.probe.empty_cache()
            session.publish_names()

    uninterrupted(work, to_the_end=True)
    release.publish_released(session, lease)


# -- finding


def find(session: Session, name: str) -> Resident:
    """The model `name` of this process or of the catalogue.

    Raises UnknownModel, CatalogUnavailable.
    """
    resident = session.residents.get(name) or by_key(session, name)
    if resident is not None and resident.catalogued and resident.place is Place.GONE:
        _refresh(session, resident)
    elif resident is None and (made := from_catalogue(session, name)):
        with session.lock:
            resident = session.residents.setdefault(made.spec.name, made)
        session.start_monitor()
    if resident is None or resident.spec.name not in session.residents:
        raise unknown(name, known_names(session))
    return resident


def from_catalogue(session: Session, name: str) -> Resident | None:
    """A new resident for the catalogue's model `name`, not yet in the session. None if unknown."""
    spec = session.catalogue.spec(name)
    if spec is None:
        return None
    resident = new_resident(session, spec, None, restore_on_call=True)
    resident.catalogued = spec
    return resident


def _refresh(session: Session, resident: Resident) -> None:
    """Updates an unloaded model from the catalogue, or removes it if the catalogue no longer has it."""
    spec = session.catalogue.spec(resident.spec.name)
    if spec == resident.catalogued:
        return
    if not resident.work.acquire(False):  # the model is being loaded, with its old specification
        return
    try:
        if spec is None:
            session.residents.pop(resident.spec.name, None)
        else:
            resident.spec = resident.catalogued = spec
            resident.backend = session.backend(spec.backend)
    finally:
        resident.work.release()


def unknown(name: str, known: tuple[str, ...], book: Book | None = None) -> UnknownModel:
    """The error for a name that no model has; `known` are the models' names, and `book` has the notebooks."""
    advice, whole = "", f"{name}.ipynb"
    if book and any([section.owner.file == whole for section in book.sections.values()]):
        advice = f"{whole} is a notebook: type its whole name."
    if name in variables():
        more = f"%gpu who      %gpu why      %gpu free {name}      rt.adopt({name!r}, {name})"
        advice = f"{name} is a variable of this notebook:  {more}"
    return UnknownModel(name, known, advice=advice)


def known_names(session: Session) -> tuple[str, ...]:
    """Names of all models of this process and of the catalogue."""
    names = set(session.catalogue.names())
    for name, resident in list(session.residents.items()):
        if resident.spec.model_type != KERNEL:
            names.add(name)
    return tuple(names)


def by_key(session: Session, name: str) -> Resident | None:
    """The model of this process with this name or key `type:name:quantization`; None if unknown."""
    for resident in list(session.residents.values()):
        if name in (resident.spec.name, resident.spec.key):
            return resident
    return None


def resolve_model(session: Session, name: str | LeaseId, loadable: bool = False) -> LeaseId:
    """The lease that `name` refers to: a lease of this process, else the only lease of that name.

    `name` may include a process, as in `qwen@4121`, or be an exact LeaseId. If `loadable` is true,
    models that an owner has registered and not loaded are found too. Raises UnknownModel,
    AmbiguousName, NotLoaded.
    """
    if isinstance(name, LeaseId):
        return _exact(session, name)
    bare, pid = split_address(name)
    if not pid or pid == str(os.getpid()):
        resident = by_key(session, bare)
        if resident is not None:
            return LeaseId(session.me, resident.spec.name)
    book = session.ledger.read()
    found = _holders(book, bare, pid, session.ledger.names() if loadable else {})
    if len(found) == 1:
        return LeaseId(found[0].id, bare)
    if found:
        raise AmbiguousName(bare, _addresses(bare, found))
    spec = session.catalogue.spec(bare) if not pid else None
    if spec is None:
        raise unknown(name, addresses(session, book), book)
    if session.guest:
        require_loadable(spec)
        raise NotLoaded(spec.name)
    return LeaseId(session.me, spec.name)


def split_address(name: str) -> tuple[str, str]:
    """The model's name and the process of an address such as `qwen@4121` or `qwen@train.ipynb`.

    The process is empty if `name` contains no process. An owner's id, as in `qwen@4121.88.1`,
    selects one of several runtimes in a process.
    """
    bare, at, process = name.rpartition("@")
    is_id = process.replace(".", "").isdigit()
    is_address = at and (is_id or process.endswith(".ipynb"))
    return (bare, process) if is_address else (name, "")


def _exact(session: Session, id: LeaseId) -> LeaseId:
    """Returns `id`. Raises UnknownModel if its owner has ended, or has no model of this name."""
    if id.owner == session.me and by_key(session, id.name):
        return id
    section = session.ledger.read().sections.get(id.owner)
    if section is None or not (
        section.lease(id.name) or id.name in session.ledger.names().get(id.owner, ())
    ):
        raise UnknownModel(id.name, addresses(session))
    return id


def _holders(
    book: Book, name: str, pid: str, loadable: Mapping[str, Collection[str]]
) -> list[Owner]:
    """The owners that hold the model `name` or can load it.

    `pid` is a process id, an owner's id, a notebook, or empty for all owners. `loadable` has the
    names that each owner can load.
    """
    found = []
    for id, section in book.sections.items():
        has_it = section.lease(name) or name in loadable.get(id, ())
        if has_it and (not pid or pid in section.owner.names):
            found.append(section.owner)
    return found


def _addresses(name: str, owners: list[Owner]) -> tuple[str, ...]:
    """The address of each owner: `qwen@4121`, or `qwen@4121.88.1` for two owners in one process."""
    pids = [owner.pid for owner in owners]
    unique = len(set(pids)) == len(pids)
    ids = [owner.id for owner in owners]
    return tuple(f"{name}@{id}" for id in (pids if unique else ids))


def addresses(session: Session, book: Book | None = None) -> tuple[str, ...]:
    """The `known_names`, and the addresses of the models that other owners hold or can load."""
    loadable = session.ledger.names()
    found = set(known_names(session))
    for id, section in (book or session.ledger.read()).sections.items():
        if id != session.me:
            held = [lease.name for lease in section.leases if lease.kind == "model"]
            names = {*held, *loadable.get(id, ())} - {KERNEL}
            found |= {f"{name}@{section.owner.pid}" for name in names}
    return tuple(sorted(found))


# -- checks of arguments


def is_module(source: Any) -> bool:
    """Whether `source` is a torch.nn.Module. This check does not import torch."""
    torch = imported("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def _known_devices(session: Session, devices: str | tuple[str, ...]) -> tuple[str, ...]:
    """The devices as a tuple. Raises UnknownDevice for a device that this process does not see."""
    wanted = (devices,) if isinstance(devices, str) else tuple(devices)
    known = tuple(device.id for device in session.probe.cards)
    for device in wanted:
        if device not in known:
            raise UnknownDevice(device, known)
    return wanted


def same_code(factory: Any, other: Any) -> bool:
    """Whether two factories have the same code: a cell that runs again makes an equal function."""
    if factory is other:
        return True
    code = getattr(factory, "__code__", None), getattr(other, "__code__", None)
    if None in code or code[0] != code[1]:
        return False
    return factory.__closure__ is None and other.__closure__ is None


# -- the memory of a notebook's own code


def find_kernel(session: Session, who: str, leased: bool = True) -> LeaseId:
    """The lease of the kernel `who`: a notebook's file name, a process id or an owner's id.

    Unless it must be `leased`, the kernel may have no lease, but only memory that cannot leave.
    Raises GpuError if no kernel has the name; the error lists the kernels that hold memory. Raises
    AmbiguousName if several kernels have the name.
    """
    book = session.ledger.read()
    kernels = [
        section.owner
        for section in book.sections.values()
        if section.lease(KERNEL) or (section.staying and not leased)
    ]
    found = [owner for owner in kernels if who in owner.names]
    if len(found) == 1:
        return LeaseId(found[0].id, KERNEL)
    if found:
        raise ambiguous_owner(who, found)
    models = _models_of(book, who)
    if models:
        address = shlex.quote(f"{models[0]}@{who}")
        those = f"It holds models: {', '.join(models)}. Name one, as in {address}"
        raise GpuError(
            f"{who} has no memory of its own. {those}\n  All of them:  %gpu evict {shlex.quote(who)}",
            process=who,
        )
    if any(lease.kind == "model" and lease.name == who for lease in book.leases()):
        name = shlex.quote(who)
        those = f"To move it to RAM:  %gpu evict {name}      and back:  %gpu restore {name}"
        raise GpuError(f"{who} is a model, and not a notebook.\n  {those}", process=who)
    those = instead(who, "Kernels with memory of their own", kernels)
    raise GpuError(f"no kernel {who!r} holds memory. {those}", process=who)


def instead(name: str, which: str, owners: Collection[Owner]) -> str:
    """Sentences that name the owner nearest to `name`, and all `owners` after the word `which`."""
    did_you_mean = nearest(name, {owner.file for owner in owners if owner.file})
    labels = listed({owner.label for owner in owners})
    return f"{did_you_mean}{which}: {labels or 'none'}."


def ambiguous_owner(name: str, owners: list[Owner]) -> AmbiguousName:
    """The error that several `owners` have the `name`. It lists their paths, or pids if those are equal."""
    paths = {owner.notebook for owner in owners}
    pids = {str(owner.pid) for owner in owners}
    return AmbiguousName(name, tuple(sorted(paths if len(paths) == len(owners) else pids)))


def is_own(session: Session, who: str) -> bool:
    """Whether `who` is the notebook of this process, whose memory a cell parks when it has ended."""
    return session.kernel is not None and notebook_has_name(session.owner.notebook, who)


def is_notebook(session: Session, name: str | LeaseId) -> bool:
    """Whether `name` is the file name or path of a notebook, and not the name of a model."""
    if not isinstance(name, str) or "@" in name or not name.endswith(".ipynb"):
        return False
    return by_key(session, name) is None


def resolve(session: Session, name: str | LeaseId, loadable: bool = False) -> LeaseId:
    """The lease that `name` refers to, also if it is a notebook; see `find_kernel`."""
    if is_notebook(session, name):
        return find_kernel(session, str(name))
    return resolve_model(session, name, loadable)


_MODELS_ONLY = {
    "pin": "To keep it on its card, type in that notebook:  %gpu park never",
    "unpin": "To let it be parked again, type in that notebook:  %gpu park asked",
    "move": "It returns only to the card that its tensors name. To free that card:  %gpu park {address}",
}


def require_model(session: Session, verb: str, typed: str | LeaseId, target: LeaseId) -> None:
    """Raises GpuError if `target` is not a model, but the memory of a notebook's own code.

    `verb` is pin, unpin or move, and `typed` is what the caller named. The error says what to type instead.
    """
    section = session.ledger.read().sections.get(target.owner)
    lease = section.lease(target.name) if section else None
    if section is None or lease is None or lease.kind != KERNEL:
        return
    owner = section.owner
    name, kind = (owner.file, "notebook") if owner.file else (str(owner.pid), "process")
    # Another notebook may have the same file name. The path that was typed has one meaning.
    address = str(typed) if notebook_has_name(owner.notebook, str(typed)) else str(owner.pid)
    advice = _MODELS_ONLY[verb].format(address=shlex.quote(address))
    raise GpuError(
        f"{name} is a {kind}: {verb} is for models, and it holds {show_bytes(lease.bytes)} of its "
        f"own.\n  {advice}",
        name=name,
    )


def in_ram_already(session: Session, verb: str, name: str, leases: list[Lease]) -> Outcome:
    """The outcome of `verb` for the process `name`, all of whose `leases` are in host memory.

    The outcome says since when the leases are in RAM, and how they come back.
    """
    parts, back = [], ""
    for lease in leases:
        size, away = show_bytes(lease.bytes), show_seconds(session.clock() - lease.away_since)
        if lease.name == KERNEL:
            parts.append(f"its own memory ({size}) for {away}, until a cell needs it")
            back = f". Bring it back now:  %gpu unpark {shlex.quote(name) if name else ''}".rstrip()
        else:
            parts.append(f"{lease.name} ({size}) for {away}, until its next use")
    because = f"all of it is in RAM already: {'; '.join(parts)}{back}"
    if not leases:
        because = "it holds nothing on a card, and nothing in RAM"
    return Outcome(verb=verb, name=name, done=True, because=because, bytes=0)


def in_ram(session: Session, id: LeaseId) -> Lease | None:
    """The lease `id` if all of its bytes are in host memory and are not being moved; else None."""
    lease = session.ledger.read().lease(*id)
    is_there = lease is not None and lease.on_host and lease.phase is Phase.SETTLED
    return lease if is_there else None


def _models_of(book: Book, who: str) -> list[str]:
    """The names of the models that the notebook `who` holds."""
    leases = [lease for entry in of_notebook(book.sections.values(), who) for lease in entry.leases]
    return [lease.name for lease in leases if lease.kind == "model"]
