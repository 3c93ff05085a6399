"""`load` registers a model if it is new, and loads it. `plan` computes the plan for the same load.

`load` and `plan` take the keywords of `register` and the options of backends, and describe the
model with the same functions. So a plan and the load that follows cannot differ. A plan is a dry
run: it decides a request without carrying it out.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..arguments import FIELDS, FLAGS, KEYWORDS, plain, read, read_keywords, read_options
from ..backends.base import Progress
from ..backends.formats.sources import AbsentBackend
from ..backends.registry import file_backend, open_backend
from ..catalog.fields import obstacle, source_absent
from ..errors import (
    AlreadyRegistered,
    BadSetting,
    BadSize,
    GpuError,
    LoadFailed,
    NotAModel,
    UnknownModel,
    UnknownSize,
)
from ..estimation import from_name
from ..facts import (
    NORMAL,
    Decisions,
    Declared,
    Footprint,
    Lease,
    ModelSpec,
    Outcome,
    Owner,
    Part,
    PlacementRules,
    Plan,
    PlanLevel,
    Replayed,
    Request,
)
from ..safe_text import MOST_QUOTED, printable, quoted
from ..scheduler import placement
from ..scheduler import transitions as books
from ..scheduler.plan import MOST_LOADS, interference
from ..scheduler.plan import plan as plan_request
from ..units import is_source, parse_room, parse_seconds, show_bytes
from . import acquire, arrivals, history, operations, registry
from .history import recorded_events
from .resident import Place, Resident
from .session import Session

Given = dict[str, Any]  # keywords of `register`, and options of a backend
_CATALOGUE = "is in the catalogue, which sets these options"
_LOADED = "is loaded with other options"


def load(
    session: Session,
    register: Callable[..., ModelSpec],
    name: str,
    source: Any,
    given: Given,
    *,
    progress: Progress | None,
    timeout: str | float | None,
) -> Outcome:
    """Registers the model with the function `register` if it is new, and loads it.

    See Runtime.load.
    """
    deadline = None if timeout is None else session.clock() + parse_seconds(timeout)
    is_new = name not in registry.known_names(session)
    if source is None and is_new and is_source(name):
        source = name
    known = session.residents.get(name)
    if known is not None and known.catalogued is None and _is_source_of(known, source):
        _revise(session, known, given)
    elif source is None and given and not is_new:
        raise AlreadyRegistered(
            name,
            f"{name} {_CATALOGUE}.\n"
            "  Change it there:  %gpu apply -f FILE      or give its SOURCE here too",
        )
    elif source is not None or given:
        read = partial(register, name, source, **given)
        if deadline is None:
            read()
        else:
            arrivals.read_source(session, name, read, deadline)
    left = None if deadline is None else max(0.0, deadline - session.clock())
    try:
        loaded = operations.preload(session, name, progress=progress, timeout=left)
    except LoadFailed:
        if is_new and name not in session.loads:
            registry.forget(session, name)  # frees the name for the next try, with the right path
        raise
    return replace(loaded, verb="load")


def _revise(session: Session, resident: Resident, given: Given) -> None:
    """Gives the model the options `given`.

    Raises AlreadyRegistered if the model is loaded with other options.
    """
    spec = _revised(session, resident, given)
    if spec == resident.spec:
        return
    name, work = spec.name, resident.work
    if resident.place is not Place.GONE or not work.acquire(blocking=False):
        raise AlreadyRegistered(
            name,
            f"{name} {_LOADED}.\n"
            f"  Forget it first:  %gpu forget {shlex.quote(name)}      or choose another name.",
        )
    try:
        resident.backend = session.backend(spec.backend)
        resident.spec = spec
    finally:
        work.release()


def described(session: Session, name: str, source: Any, given: Given) -> Subject | None:
    """The request for the model `name` as `load` would register it. Nothing is registered.

    The result is None if the name is unknown, and neither `source` nor a backend or size in `given`
    describes the model. Raises the errors of `register`.
    """
    known = registry.by_key(session, name) or registry.from_catalogue(session, name)
    if known is not None and not _is_source_of(known, source):
        return of_resident(known, session, f"{name} is registered already, from another source")
    if known is not None:
        return _with_options(session, known, given)
    if source is None and not {"backend", "size"} & given.keys():
        return None
    if source is None and is_source(name):
        source = name
    spec, factory = registry.specified(session, name, source, given)
    return of_resident(registry.new_resident(session, spec, factory, True), session)


def _is_source_of(known: Resident, source: Any) -> bool:
    """Whether the model `known` was registered from `source`. True if no `source` is given."""
    if source is None:
        return True
    if isinstance(source, str):
        return source == known.spec.source
    return known.origin is not None and registry.same_code(known.origin, source)


def _with_options(session: Session, known: Resident, given: Given) -> Subject:
    """The request for the model `known`, with the options `given` instead of its own."""
    spec = _revised(session, known, given)
    if spec == known.spec:
        return of_resident(known, session)
    planned = registry.new_resident(session, spec, known.origin, True)
    planned.measured = known.measured
    why_not = ""
    if known.catalogued is not None:
        why_not = f"{spec.name} {_CATALOGUE}"
    elif known.place is not Place.GONE:
        why_not = f"{spec.name} {_LOADED}; forget it first"
    return of_resident(planned, session, why_not)


def _revised(session: Session, known: Resident, given: Given) -> ModelSpec:
    """The specification of the model `known`, with the options `given` instead of its own."""
    old = known.spec
    if not given:
        return old
    own = {name: getattr(old, name) for name in KEYWORDS}
    origin = known.origin or old.source or None
    spec, _ = registry.specified(session, old.name, origin, {**own, **old.options, **given})
    return replace(spec, placement=old.placement, enabled=old.enabled)


def command(name: str, source: Any, given: Given) -> str:
    """What to type to load the planned model: words after `%gpu`, or a call in Python.

    >>> command("models/writer", None, {"context_length": 256}), command("qwen", None, {})
    ('load models/writer --context 256', 'preload qwen')
    >>> command("qwen", None, {"gpu_layers": 3})
    "rt.load('qwen', gpu_layers=3)"
    """
    is_typed = source is None or isinstance(source, str)
    if not is_typed or not given.keys() <= FLAGS.keys():
        sources = [] if source is None else [quoted(source)]
        named = [f"{key}={quoted(value)}" for key, value in given.items()]
        return f"rt.load({', '.join([repr(name), *sources, *named])})"
    is_load = source or given.keys() - {"timeout"} or is_source(name)
    words = ["load" if is_load else "preload", name]
    if source:
        words.append(source)
    typed = [shlex.quote(word) for word in words]
    return " ".join([*typed, *flags(given)])


def flags(given: Given) -> list[str]:
    """The options `given` as they are typed: `--size 8GiB --keep`."""
    typed: list[str] = []
    for name, value in given.items():
        if value is not False:
            typed.append(FLAGS[name])
        if not isinstance(value, bool):
            is_bytes = name == "size" and isinstance(value, int)
            text = f"{value}B" if is_bytes else printable(str(plain(value)), MOST_QUOTED)
            typed.append(shlex.quote("".join(text.split())))
    return typed


# -- the dry run of a model, a size, or a source that is not registered

# A number of parameters in the name of a model: `7B` is not seven bytes.
_PARAMETERS = re.compile(r"(\d+x)?\d+(\.\d+)?[bB]")
PLACED = ("devices", "layout")  # if given with a size, the size is placed like a model
_LIKE_A_SIZE = re.compile(r"\s*[-+]?[\d._,]+\s*[a-zA-Z]{0,3}\s*$")


def plan(
    session: Session,
    name_or_size: str | int,
    source: Any,
    given: dict[str, Any],
    timeout: float | None,
    for_wish: bool = False,
) -> Plan:
    """The result of a dry run, which changes nothing; see Runtime.plan and `acquire.placement`."""
    subject = _subject(session, name_or_size, source, given)
    rules = subject.rules
    if for_wish:
        rules = replace(rules, spared=session.wished.get(str(name_or_size), 0))
    book = session.read_book()
    world = session.world()
    book = books.publish(book, session.truth(), world)
    asked = (subject.wanted.owner, subject.wanted.name)
    waiting = next(
        (t for t in book.tickets if t.verb == "use" and (t.owner, t.name) == asked), None
    )
    key, arrived = (waiting.key, waiting.arrived) if waiting else ("plan", world.now)
    request = Request(key, subject.wanted, subject.footprint, arrived, rules, wait=False)
    found = plan_request(book, request, world, session.rank)
    typed = given if timeout is None else {**given, "timeout": timeout}
    if subject.wanted.kind == "block" and is_placed(given):
        typing = ""
    elif subject.wanted.kind == "block":
        size = name_or_size if isinstance(name_or_size, str) else f"{name_or_size}B"
        typing = " ".join(["".join(size.split()), *flags(typed)])
    else:
        typing = command(str(name_or_size), source, typed)
    if found.level in (PlanLevel.ROOM, PlanLevel.EVICT):
        loads = recorded_events(session, MOST_LOADS, found.name, ("loaded",))
        found = replace(found, because=f"{found.because} {interference(loads)}".rstrip())
    title = book.title(subject.wanted)
    return replace(found, name=title, obstacle=subject.obstacle, command=typing)


def why(session: Session, name: str, replay: bool) -> Decisions | tuple[Replayed, ...]:
    """The last decisions on the model or notebook `name`, and what may leave for it; see Runtime.why."""
    if replay:
        return history.replays(session, name)
    decisions = Decisions(history.why(session, name))
    # It may be here no more, or its size is unknown: nothing would be loaded.
    with suppress(GpuError):
        if name and registry.resolve(session, name, loadable=True):
            decisions.leavers = plan(session, name, None, {}, None).leavers
    return decisions


def _subject(session: Session, words: str | int, source: Any, given: dict[str, Any]) -> Subject:
    """The subject that `words` name: a model of any owner, a size of bytes, or a source."""
    name = str(words)
    if model := described(session, name, source, given):
        return model
    size = size_in(words)
    if size is not None:
        return of_bytes(size, session, given)
    try:
        target = registry.resolve(session, name, loadable=True)
        section = session.ledger.read().sections[target.owner]
        lease = section.lease(target.name) or Lease(*target)
        declared = session.ledger.names().get(target.owner, {}).get(target.name)
        return of_lease(lease, section.owner, given, declared)
    except (UnknownModel, KeyError):  # the answer lists the known names
        known, all_names = registry.known_names(session), registry.addresses(session)
        return of_nobody(unregistered(name, known, all_names, session, given), session)


class Subject(NamedTuple):
    """The request that a dry run decides."""

    wanted: Lease
    footprint: Footprint
    rules: PlacementRules
    obstacle: str = ""  # why the model could not be loaded even if there were room


def size_in(words: str | int) -> int | None:
    """The bytes that `words` name; None if `words` are no size.

    Raises BadSize for zero or less, and for a mistyped size.
    """
    if isinstance(words, str) and _PARAMETERS.fullmatch(words.strip()):
        return None
    try:
        return parse_room(words)
    except BadSize:
        if not isinstance(words, str) or _LIKE_A_SIZE.match(words):
            raise  # the text is a mistyped size, not a name
        return None


def is_placed(given: dict[str, Any]) -> bool:
    """Whether the `given` options say where to place the bytes.

    `%gpu` has no such options. So a plan with one of them suggests no command.
    """
    return any(name in given for name in PLACED)


def of_bytes(size: int, session: Session, given: dict[str, Any]) -> Subject:
    """The request for a lease of `size` bytes for the user's code.

    If `given` has `devices` or a `layout`, the bytes are placed like a model with `size` bytes.
    Raises BadSetting if `given` has any further option, except the importance.
    """
    for name, value in given.items():
        if name not in ("importance", *PLACED):
            raise BadSetting(name, value, "left out: a size has no such option")
    rank = read("importance", given.get("importance", NORMAL), FIELDS["importance"].rule)
    name = f"a block of {show_bytes(size)}"
    wanted = Lease(session.me, name, kind="block", importance=rank)
    rules = PlacementRules(policy=session.settings.gpu_placement)
    if is_placed(given):
        devices = read("devices", given.get("devices", ()), FIELDS["devices"].rule)
        layout = placement.check_layout(given.get("layout", "auto"))
        rules = replace(session.placement, devices=devices, layout=layout)
    return Subject(wanted, Footprint.of(size), rules)


def of_resident(resident: Resident, session: Session, why_not: str = "") -> Subject:
    """The request for a model of this process, which is not loaded because of `why_not`, if given.

    Raises UnknownSize, BadSetting, LoadFailed.
    """
    rules = acquire.placement(session, resident)
    footprint = session.sizing.footprint(resident, rules.devices)
    wanted = acquire.wanted_lease(session, resident)
    why_not = why_not or obstacle(resident.spec)
    if not why_not and resident.handle is None:
        why_not = source_absent(resident.spec)
    return Subject(wanted, footprint, rules, why_not)


def of_nobody(resident: Resident, session: Session) -> Subject:
    """The request for a source that is not registered. Raises NotAModel if its size is unknown."""
    name = resident.spec.name
    try:
        found = of_resident(resident, session)
    except UnknownSize as error:
        raise NotAModel(f"{error.facts['why']}.", name=name, source=name) from None
    guessed = any(part.source == "name" for part in found.footprint.parts)
    if guessed:
        return found._replace(obstacle=f"{name} is not here, and only its name gives its size")
    return found


def of_lease(
    lease: Lease, owner: Owner, given: dict[str, Any], declared: Declared | None = None
) -> Subject:
    """The request for a model of another owner, with the size that the owner measured.

    Only the owner can set options of its model. So if options are `given`, the result has an
    obstacle, even with enough room. If the model is not loaded, the request has the size and the
    importance that the owner `declared`. Raises UnknownSize if no size is known.
    """
    size = lease.bytes
    source = "measured"
    if not size:
        if declared is None or not declared.bytes:
            why = f"{owner.label} has registered it without a size, and has not loaded it"
            raise UnknownSize(lease.name, why)
        size = declared.bytes
        source = "declared"
        lease = replace(lease, importance=declared.importance)
    footprint = Footprint((Part("all", size, source, f"by {owner.label}"),))
    obstacle = f"{owner.label} sets the options of {lease.name}" if given else ""
    return Subject(lease, footprint, PlacementRules(), obstacle)


def unregistered(
    words: str,
    known: tuple[str, ...],
    all_names: tuple[str, ...],
    session: Session,
    given: dict[str, Any],
) -> Resident:
    """A model that is not registered, made from `words`: a path, a hub id or a name with a size.

    `given` are the options of the model. A path is always accepted. Other words raise UnknownModel
    if they are close to one of the names `known` (a typing mistake), or if they contain no size
    such as 7B. The error suggests names from `all_names`, which include the models of other owners.
    """
    if not _is_path(words):
        mistyped = difflib.get_close_matches(words, known, n=1)
        if mistyped or from_name(words) is None:
            raise UnknownModel(words, all_names)
    kind = file_backend(words)
    wishes = {**read_keywords(given), "backend": kind, "source": words}
    spec = ModelSpec(words, options=read_options(kind, given), **wishes)
    is_gguf = kind == "llama_cpp"
    backend = open_backend(kind, session.probe) if is_gguf else AbsentBackend(kind)
    return Resident(spec, backend, session.me, session.clock)


def _is_path(words: str) -> bool:
    if "/" in words or words.endswith((".gguf", ".safetensors")):
        return True
    return os.path.isdir(os.path.expanduser(words))
