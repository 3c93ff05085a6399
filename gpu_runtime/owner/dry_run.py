"""The subject of a dry run (`plan`): a model, a size, or a source that is not registered.

A dry run decides a request without carrying it out.
"""

from __future__ import annotations

import difflib
import os
import re
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..backends.formats.sources import AbsentBackend
from ..backends.registry import file_backend, open_backend
from ..catalog.entries import obstacle, source_absent
from ..errors import BadSetting, BadSize, NotAModel, UnknownModel, UnknownSize
from ..estimation.footprint import from_name
from ..facts import (
    NORMAL,
    Declared,
    Footprint,
    Lease,
    ModelSpec,
    Owner,
    Part,
    PlacementRules,
    Plan,
    PlanLevel,
    Request,
    lease_title,
)
from ..kinds import read
from ..model_fields import FIELDS, read_options
from ..scheduler import placement
from ..scheduler import transitions as books
from ..scheduler.plan import MOST_LOADS, interference
from ..scheduler.plan import plan as plan_request
from ..units import parse_room, show_bytes
from . import demand, kernel_names, loading, registry
from .history import recorded_events
from .loading import Described
from .resident import Resident
from .session import Session

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
    """The result of a dry run, which changes nothing; see Runtime.plan and `demand.placement`."""
    subject = _subject(session, name_or_size, source, given)
    rules = subject.rules
    if for_wish:
        rules = replace(rules, spared=session.wished.get(str(name_or_size), 0))
    book = session.read_book()
    world = session.world()
    book = books.publish(book, session.truth(), world)
    request = Request("plan", subject.wanted, subject.footprint, world.now, rules, wait=False)
    found = plan_request(book, request, world, session.rank)
    typed = given if timeout is None else {**given, "timeout": timeout}
    if subject.wanted.kind == "block" and is_placed(given):
        command = ""
    elif subject.wanted.kind == "block":
        size = name_or_size if isinstance(name_or_size, str) else f"{name_or_size}B"
        command = " ".join(["".join(size.split()), *loading.flags(typed)])
    else:
        command = loading.command(str(name_or_size), source, typed)
    if found.level in (PlanLevel.ROOM, PlanLevel.EVICT):
        loads = recorded_events(session, MOST_LOADS, found.name, ("loaded",))
        found = replace(found, because=f"{found.because} {interference(loads)}".rstrip())
    title = lease_title(subject.wanted, book.owner(subject.wanted.owner))
    return replace(found, name=title, obstacle=subject.obstacle, command=command)


def _subject(session: Session, words: str | int, source: Any, given: dict[str, Any]) -> Subject:
    """The subject that `words` name: a model of any owner, a size of bytes, or a source."""
    name = str(words)
    described = loading.described(session, name, source, given)
    if described is not None:
        return of_described(described, session)
    size = size_in(words)
    if size is not None:
        return of_bytes(size, session, given)
    try:
        target = kernel_names.resolve(session, name, loadable=True)
        section = session.ledger.read().sections[target.owner]
        lease = section.lease(target.name) or Lease(*target)
        declared = session.ledger.names().get(target.owner, {}).get(target.name)
        return of_lease(lease, section.owner, given, declared)
    except (UnknownModel, KeyError):  # the answer lists the known names
        known, all_names = registry.known_names(session), registry.addresses(session)
        found = unregistered(name, known, all_names, session, given)
        return of_nobody(found, session)


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
    name = f"a lease of {show_bytes(size)}"
    wanted = Lease(session.me, name, kind="block", importance=rank)
    rules = PlacementRules(policy=session.settings.gpu_placement)
    if is_placed(given):
        devices = read("devices", given.get("devices", ()), FIELDS["devices"].rule)
        layout = placement.check_layout(given.get("layout", "auto"))
        rules = replace(session.settings.placement(), devices=devices, layout=layout)
    return Subject(wanted, Footprint.of(size), rules)


def of_described(model: Described, session: Session) -> Subject:
    """The request for a model as `load` would register it.

    Raises UnknownSize, BadSetting, LoadFailed.
    """
    found = of_resident(model.resident, session)
    return found._replace(obstacle=model.obstacle) if model.obstacle else found


def of_resident(resident: Resident, session: Session) -> Subject:
    """The request for a model of this process. Raises UnknownSize, BadSetting, LoadFailed."""
    rules = demand.placement(session, resident)
    footprint = session.sizing.footprint(resident, rules.devices)
    wanted = demand.wanted_lease(session, resident)
    why_not = obstacle(resident.spec)
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
    wishes, options = loading.split(given)
    spec = ModelSpec(words, kind, source=words, options=read_options(kind, options), **wishes)
    is_gguf = kind == "llama_cpp"
    backend = open_backend(kind, session.probe) if is_gguf else AbsentBackend(kind)
    return Resident(spec, backend, session.me, session.clock)


def _is_path(words: str) -> bool:
    if "/" in words or words.endswith((".gguf", ".safetensors")):
        return True
    return os.path.isdir(os.path.expanduser(words))
