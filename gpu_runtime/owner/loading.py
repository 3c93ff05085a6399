"""`load` registers a model if it is new, and loads it. `plan` computes the plan for the same load.

`load` and `plan` take the keywords of `register` and the options of backends, and describe the
model with the same functions. So a plan and the load that follows cannot differ.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from ..backends.base import Progress
from ..errors import AlreadyRegistered, LoadFailed
from ..facts import ModelSpec, Outcome
from ..kinds import plain, read
from ..model_fields import FIELDS, FLAGS, KEYWORDS
from ..safe_text import MOST_QUOTED, printable, quoted
from ..units import is_source, parse_seconds
from . import loads, operations, registry
from .resident import Place, Resident
from .session import Session

Given = dict[str, Any]  # keywords of `register`, and options of a backend
_CATALOGUE = "is in the catalogue, which sets these options"
_LOADED = "is loaded with other options"


class Described(NamedTuple):
    """A model as `load` would register it."""

    resident: Resident  # the registered model, or a model that is only planned
    obstacle: str = ""  # why `load` refuses these options


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
            loads.read(session, name, read, deadline)
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
            f"  Forget it first:  %gpu forget {name}      or choose another name.",
        )
    try:
        resident.backend = session.backend(spec.backend)
        resident.spec = spec
    finally:
        work.release()


def described(session: Session, name: str, source: Any, given: Given) -> Described | None:
    """The model `name` as `load` would register it. Nothing is registered.

    The result is None if the name is unknown, and neither `source` nor a backend or size in `given`
    describes the model. Raises the errors of `register`.
    """
    known = registry.by_key(session, name) or registry.from_catalogue(session, name)
    if known is not None and not _is_source_of(known, source):
        return Described(known, f"{name} is registered already, from another source")
    if known is not None:
        return _with_options(session, known, given)
    if source is None and not {"backend", "size"} & given.keys():
        return None
    wishes, options = split(given)
    wishes = {**KEYWORDS, **wishes}
    if source is None and is_source(name):
        source = name
    spec, factory = registry.specified(session, name, source, wishes, options)
    return Described(registry.new_resident(session, spec, factory, True))


def _is_source_of(known: Resident, source: Any) -> bool:
    """Whether the model `known` was registered from `source`. True if no `source` is given."""
    if source is None:
        return True
    if isinstance(source, str):
        return source == known.spec.source
    return known.origin is not None and registry.same_code(known.origin, source)


def _with_options(session: Session, known: Resident, given: Given) -> Described:
    """The model `known`, with the options `given` instead of its own."""
    spec = _revised(session, known, given)
    if spec == known.spec:
        return Described(known)
    planned = registry.new_resident(session, spec, known.origin, True)
    planned.measured = known.measured
    if known.catalogued is not None:
        return Described(planned, f"{spec.name} {_CATALOGUE}")
    if known.place is not Place.GONE:
        return Described(planned, f"{spec.name} {_LOADED}; forget it first")
    return Described(planned)


def _revised(session: Session, known: Resident, given: Given) -> ModelSpec:
    """The specification of the model `known`, with the options `given` instead of its own."""
    old = known.spec
    if not given:
        return old
    wishes, options = split(given)
    own = {name: getattr(old, name) for name in KEYWORDS}
    spec, _ = registry.specified(
        session,
        old.name,
        known.origin or old.source or None,
        {**own, **wishes},
        {**old.options, **options},
    )
    return replace(spec, placement=old.placement, enabled=old.enabled)


def split(given: Given) -> tuple[Given, Given]:
    """Two dictionaries made from `given`: the keywords of `register`, and the backend's options.

    The values of the keywords are checked and converted. Every other name is a backend's option.
    """
    wishes = {
        name: read(name, value, FIELDS[name].rule)
        for name, value in given.items()
        if name in KEYWORDS
    }
    return wishes, {name: value for name, value in given.items() if name not in KEYWORDS}


def command(name: str, source: Any, given: Given) -> str:
    """What to type to load the planned model: words after `%gpu`, or a call in Python.

    >>> command("models/writer", None, {"context_length": 256}), command("qwen", None, {})
    ('load models/writer --context 256', 'preload qwen')
    >>> command("qwen", None, {"gpu_layers": 3})
    "rt.load('qwen', gpu_layers=3)"
    """
    is_typed = source is None or isinstance(source, str)
    if not is_typed or not given.keys() <= FLAGS.keys():
        words = [repr(name)]
        if source is not None:
            words.append(quoted(source))
        for key, value in given.items():
            words.append(f"{key}={quoted(value)}")
        arguments = ", ".join(words)
        return f"rt.load({arguments})"
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
