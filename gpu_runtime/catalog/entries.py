"""One model of the catalogue: what was written of it, and what that means in this process.

What was written is kept whole. What it means hangs on who asks: on this process's settings, and on the backends that
this version has.
"""

from __future__ import annotations

import os
from typing import Any

from ..backends.base import looks_like_hub_id
from ..backends.engines.arguments import RESERVED_FLAGS, group_flags
from ..backends.registry import backend_names, missing
from ..errors import LoadFailed, ModelDisabled
from ..facts import NORMAL, ModelSpec, Value
from ..settings import Settings
from .schema import BACKENDS, TRUST, Fields, is_trust, read_arguments, unknown_fields

_OPTIONS = (
    "context_length",
    "sequences",
    "cache_dtype",
    "gpu_layers",
    "dtype",
    "revision",
    "attn_implementation",
    "task",
    "chat_template",
    "thinking",
)
MOST_TEMPLATE = 1 << 20  # letters
_BY_CATEGORY = {"diffusion": "diffusers"}


class Entry(Value):
    """A model as it stands in the catalogue: `body` is a document of apiVersion, kind, metadata and spec."""

    name: str
    body: dict[str, Any]
    file: str = ""  # where it stands

    @property
    def id(self) -> str:
        """The other name that it answers to; empty where there is none."""
        return str(self.body["spec"].get("id") or "")


def spec_of(entry: Entry, settings: Settings) -> ModelSpec:
    """What the entry means to a process with these settings.

    An engine's arguments win over the fields beside them: they are what the engine is told.
    """
    fields = Fields.model_validate(entry.body["spec"])
    words = fields.runtime_args or ()
    said = {
        name: getattr(fields, name) for name in (*_OPTIONS, "quantization", "max_tensor_parallel")
    }
    said |= {field: value for _, field, value in read_arguments(words) if field}
    if said["gpu_layers"] is None:
        said["gpu_layers"] = settings.inference_gpu_layers
    options = {name: said[name] for name in _OPTIONS if said[name] is not None}
    if "chat_template" in options:
        options["chat_template"] = _template(options["chat_template"])
    if words:
        options["runtime_args"] = list(passed_on(words, settings))
    if settings.gpu_trust_remote_code and _asks_for_trust(fields):
        options["trust_remote_code"] = True
    model_type = fields.type or fields.model_type or fields.category or "other"
    source = _source(entry, fields)
    named = settings.inference_backend and BACKENDS.get(
        settings.inference_backend.lower(), settings.inference_backend
    )
    backend = fields.runtime or fields.backend or named or _backend(source, model_type)
    if backend == "fake":
        source = ""
    return ModelSpec(
        entry.name,
        backend,
        source=source,
        size=fields.memory or fields.size or fields.vram_mb,
        model_type=model_type,
        quantization=said["quantization"] or "",
        importance=fields.importance or NORMAL,
        keep=bool(fields.keep or fields.pin),
        keep_alive=fields.keep_alive or 0.0,
        layout=fields.layout or "auto",
        devices=fields.gpus if isinstance(fields.gpus, tuple) else (),
        placement=_placement(fields, said),
        enabled=fields.enabled is not False,
        options=options,
    )


def _placement(fields: Fields, said: dict[str, Any]) -> dict[str, Any]:
    """What it says of PlacementRules, by their names."""
    count = fields.gpus if isinstance(fields.gpus, int) else None
    rules = {
        "least_cards": count,
        "most_cards": count or said["max_tensor_parallel"],
        "card_bytes": fields.gpu_memory,
        "factor": fields.gpu_fraction_factor,
        "largest_fraction": fields.fraction_largest_possible,
    }
    return {name: value for name, value in rules.items() if value is not None}


def _source(entry: Entry, fields: Fields) -> str:
    return fields.path or fields.source or fields.id or entry.name


def _template(said: str) -> str:
    """The text of a chat template, also where its file is named; a file that cannot be read is told when it is used."""
    if "{" in said:
        return said
    try:
        with open(os.path.expanduser(said), encoding="utf-8") as file:
            return file.read(MOST_TEMPLATE)
    except (OSError, UnicodeDecodeError):
        return said


def _backend(source: str, model_type: str) -> str:
    if source.endswith(".gguf"):
        return "llama_cpp"
    return _BY_CATEGORY.get(model_type, "transformers")


def passed_on(words: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """The arguments that an engine is told: its own code only where the process's owner trusts it."""
    groups = (
        took
        for flag, _, took in group_flags(words)
        if settings.gpu_trust_remote_code or not is_trust(flag)
    )
    return tuple(word for took in groups for word in took)


def _asks_for_trust(fields: Fields) -> bool:
    said = (value for flag, value, _ in group_flags(fields.runtime_args or ()) if is_trust(flag))
    return bool(fields.trust_remote_code) or any(
        (value or "").lower() not in ("false", "0", "no") for value in said
    )


def require_loadable(spec: ModelSpec) -> None:
    """Nothing, where it may be loaded. Raises ModelDisabled, or LoadFailed where no backend can: before anybody
    leaves."""
    if not spec.enabled:
        raise ModelDisabled(spec.name)
    if because := obstacle(spec):
        install = (
            missing(spec.backend).partition("\n")[2]
            or f"  What it would take:  %gpu plan {spec.name}"
        )
        raise LoadFailed(
            f"{spec.name} cannot be loaded: {because}.\n{install}",
            name=spec.name,
            source=spec.source,
        )


def obstacle(spec: ModelSpec) -> str:
    """Why it would not be loaded whatever the room; empty where it would."""
    return cannot_load(spec) if spec.enabled else "it is disabled in the catalogue"


def cannot_load(spec: ModelSpec) -> str:
    """Why no backend here can load it; empty where one can."""
    known = backend_names()
    if spec.backend not in known:
        return (
            f"its backend {spec.backend} is not part of this version, which has {', '.join(known)}"
        )
    return missing(spec.backend).partition("\n")[0].rstrip(".")


def state(spec: ModelSpec) -> str:
    """`ready`, `disabled`, or what is missing."""
    if not spec.enabled:
        return "disabled"
    if spec.backend not in backend_names():
        return f"no backend {spec.backend} here"
    return f"{spec.backend} is not installed" if cannot_load(spec) else "ready"


def notes(entry: Entry, settings: Settings) -> list[str]:
    """What whoever applies it should know: what is kept and has no effect here."""
    spec, written = spec_of(entry, settings), entry.body["spec"]
    fields = Fields.model_validate(written)
    words = fields.runtime_args or ()
    said = []
    if unknown := unknown_fields(written):
        said.append(f"unknown here, and kept: {', '.join(unknown)}")
    flags = [(flag, field) for flag, field, _ in read_arguments(words)]
    if placed := [flag for flag, _ in flags if flag in RESERVED_FLAGS]:
        said.append(f"decided by the placement, and kept: {', '.join(placed)}")
    if others := [
        flag for flag, field in flags if not field and flag not in RESERVED_FLAGS and not is_trust(flag)
    ]:
        said.append(f"kept for an engine's command line: {', '.join(others)}")
    if _asks_for_trust(fields) and not settings.gpu_trust_remote_code:
        said.append(
            f"{TRUST} is kept, and not passed on where GPU_TRUST_REMOTE_CODE is off, as it is here"
        )
    if cannot_load(spec):
        known = spec.backend in backend_names()
        said.append(
            "planned, and not loaded here: "
            + (cannot_load(spec) if known else f"this version has no backend {spec.backend}")
        )
        if spec.size is None and not os.path.exists(spec.source):
            said.append("no size is declared and its files are not here; write  memory: 10GiB")
    elif spec.source and not os.path.exists(spec.source) and not looks_like_hub_id(spec.source):
        said.append(f"{spec.source} is not there (yet)")
    return said
