"""What `plan` is asked about: a model of ours, one that another process holds, a size, or what nobody has registered
yet: a path, a hub id, or a name that tells its size.

Here the words become a request; what would come of it is the planner's to say.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..backends.missing import AbsentBackend
from ..backends.registry import open_backend
from ..catalog.entries import obstacle
from ..errors import BadSize, NotAModel, UnknownModel, UnknownSize
from ..estimation.footprint import from_name
from ..facts import Footprint, Lease, ModelSpec, Owner, Part, PlacementRules
from ..units import parse_room, show_bytes
from . import demand
from .resident import Resident
from .session import Session

_PARAMETERS = re.compile(
    r"(\d+x)?\d+(\.\d+)?[bB]"
)  # 7B, as people call a model's size: not seven bytes


class Subject(NamedTuple):
    """What would be asked of the book."""

    wanted: Lease
    footprint: Footprint
    rules: PlacementRules
    obstacle: str = ""  # why it would not be loaded even if there were room


def size_in(words: str | int) -> int | None:
    """The size that the words name; None where they name none. Raises BadSize for zero and below."""
    if isinstance(words, str) and _PARAMETERS.fullmatch(words.strip()):
        return None
    try:
        return parse_room(words)
    except BadSize:
        if not isinstance(words, str) or re.match(r"\s*[-+]?[\d.]+\s*[a-zA-Z]{0,3}\s*$", words):
            raise  # a slip in a size, not a name
        return None


def of_bytes(size: int, session: Session) -> Subject:
    """A lease of bytes for code."""
    wanted = Lease(session.me, f"a lease of {show_bytes(size)}", kind="block")
    return Subject(
        wanted, Footprint.of(size), PlacementRules(policy=session.settings.gpu_placement)
    )


def of_resident(resident: Resident, session: Session, options: dict[str, Any]) -> Subject:
    """A model of ours, with these options in the place of its own. Raises UnknownSize, BadSetting, LoadFailed."""
    rules = demand.placement(session, resident)
    footprint = session.sizing.footprint(resident, rules.devices, options)
    return Subject(
        demand.wanted_lease(session, resident), footprint, rules, obstacle(resident.spec)
    )


def of_nobody(resident: Resident, session: Session) -> Subject:
    """What nobody has registered. Raises NotAModel where there is nothing of that name that tells a size."""
    name = resident.spec.name
    try:
        found = of_resident(resident, session, {})
    except UnknownSize as error:
        raise NotAModel(f"{error.why}.", name=name, source=name) from None
    guessed = any(part.source == "name" for part in found.footprint.parts)
    return (
        found._replace(obstacle=f"{name} is not here, and only its name tells its size")
        if guessed
        else found
    )


def of_lease(lease: Lease, owner: Owner) -> Subject:
    """A model of another process, as large as it measured it. Raises UnknownSize where it only registered it."""
    if not lease.bytes:
        raise UnknownSize(
            lease.name,
            f"{owner.label} has registered it and not loaded it, so that process alone can tell",
        )
    footprint = Footprint((Part("all", lease.bytes, "measured", f"by {owner.label}"),))
    return Subject(lease, footprint, PlacementRules())


def unregistered(
    words: str, known: Iterable[str], session: Session, options: dict[str, Any]
) -> Resident:
    """A path, a hub id or a telling name, as a model of ours that nobody may load. Raises UnknownModel for any other.

    A name close to a known one is a slip, whatever size it tells.
    """
    known = tuple(known)
    a_path = (
        "/" in words
        or words.endswith((".gguf", ".safetensors"))
        or os.path.isdir(os.path.expanduser(words))
    )
    if not a_path and (from_name(words) is None or difflib.get_close_matches(words, known, n=1)):
        raise UnknownModel(words, known)
    spec = ModelSpec(
        words,
        "llama_cpp" if words.endswith(".gguf") else "transformers",
        source=words,
        options=options,
    )
    backend = (
        open_backend(spec.backend, session.probe)
        if spec.backend == "llama_cpp"
        else AbsentBackend(spec.backend)
    )
    return Resident(spec, backend, session.me, session.clock)
