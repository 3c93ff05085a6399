"""One model of the catalogue: its entry, and the ModelSpec that a process makes from it."""

from __future__ import annotations

import os
from typing import Any

from .. import limited_files
from ..backends.base import looks_like_hub_id
from ..backends.engines.recipe import RESERVED_FLAGS, group_flags
from ..backends.registry import backend_names, file_backend, missing
from ..errors import LoadFailed, ModelDisabled
from ..facts import NORMAL, ModelSpec, Value
from ..options import OPTIONS, PASSED_TO_LLAMA
from ..settings import Settings
from .schema import BACKENDS, TRUST, Fields, is_trust, read_arguments, unknown_fields

_OPTIONS = (
    *("context_length", "sequences", "cache_dtype", "gpu_layers", "dtype", "revision"),
    *("allow_missing", "attn_implementation", "task", "chat_template", "thinking"),
    "leave_out_tools",
)
# Options of llama.cpp; an entry of another engine keeps them without effect.
OF_LLAMA = (*PASSED_TO_LLAMA, "flash_attn", "embedding", "split_mode", "main_gpu", "isolated")
MOST_TEMPLATE = 1 << 20  # characters of a chat template's file
_BY_CATEGORY = {"diffusion": "diffusers"}


class CatalogEntry(Value):
    """A model of the catalogue, with the fields as a person wrote them and with absolute paths."""

    name: str
    body: dict[str, Any]  # the first format of `manifests`: apiVersion, kind, metadata and spec
    file: str = ""  # the catalogue's file that has the entry

    @property
    def id(self) -> str:
        """The model's id, a second name; empty without one."""
        return str(self.body["spec"].get("id") or "")


def spec_of(entry: CatalogEntry, settings: Settings) -> ModelSpec:
    """The ModelSpec that a process with these `settings` makes from the `entry`.

    A command-line argument counts more than a contradicting field, because the engine gets it.
    """
    fields = Fields.model_validate(entry.body["spec"])
    values = _values(fields, settings)
    model_type = fields.type or fields.model_type or fields.category or "other"
    source = fields.path or fields.source or fields.id or entry.name
    backend = _backend(fields, settings, source, model_type)
    return ModelSpec(
        entry.name,
        backend,
        source="" if backend == "fake" else source,
        size=fields.memory or fields.size or fields.vram_mb,
        model_type=model_type,
        quantization=values["quantization"] or "",
        importance=fields.importance or NORMAL,
        keep=bool(fields.keep or fields.pin),
        keep_alive=fields.keep_alive or 0.0,
        layout=fields.layout or "auto",
        devices=fields.gpus if isinstance(fields.gpus, tuple) else (),
        placement=_placement(fields, values["max_tensor_parallel"]),
        enabled=fields.enabled is not False,
        options=_options(fields, values, settings, backend),
    )


def _values(fields: Fields, settings: Settings) -> dict[str, Any]:
    """The final values of those fields that an argument for the engine can override."""
    names = (*_OPTIONS, "quantization", "max_tensor_parallel")
    values = {name: getattr(fields, name) for name in names}
    for _, field, value in read_arguments(fields.runtime_args or ()):
        if field:
            values[field] = value
    values["cache_dtype"] = values["cache_dtype"] or fields.type_k or fields.type_v
    if values["gpu_layers"] is None:
        values["gpu_layers"] = settings.inference_gpu_layers
    return values


def _options(
    fields: Fields, values: dict[str, Any], settings: Settings, backend: str
) -> dict[str, Any]:
    """The options of the model's `backend`."""
    used = [name for name in OF_LLAMA if name not in _OPTIONS and _is_option(name, backend)]
    own = {name: getattr(fields, name) for name in used}
    options = {name: value for name, value in own.items() if value is not None}
    options |= {name: values[name] for name in _OPTIONS if values[name] is not None}
    if "chat_template" in options:
        options["chat_template"] = _template(options["chat_template"])
    if fields.runtime_args:
        options["runtime_args"] = list(passed_on(fields.runtime_args, settings))
    if settings.gpu_trust_remote_code and _requests_trust(fields):
        options["trust_remote_code"] = True
    return options


def _is_option(name: str, backend: str) -> bool:
    backends = OPTIONS[name].backends
    return not backends or backend in backends


def _placement(fields: Fields, most_cards: int | None) -> dict[str, Any]:
    """The fields of PlacementRules that the entry sets, from its `fields`."""
    count = fields.gpus if isinstance(fields.gpus, int) else None
    rules = {
        "least_cards": count,
        "most_cards": count or most_cards,
        "card_bytes": fields.gpu_memory,
        "factor": fields.gpu_fraction_factor,
        "largest_fraction": fields.fraction_largest_possible,
    }
    return {name: value for name, value in rules.items() if value is not None}


def _template(given: str) -> str:
    """The text of a chat template: `given` itself if it has a brace, else the content of this file."""
    if "{" in given:
        return given
    try:
        return limited_files.text(os.path.expanduser(given), MOST_TEMPLATE)
    except OSError:  # the use of the template raises the error
        return given


def _backend(fields: Fields, settings: Settings, source: str, model_type: str) -> str:
    """The backend of the entry, else of INFERENCE_BACKEND, else by the type of model or the files."""
    named = fields.runtime or fields.backend
    if named:
        return named
    preferred = settings.inference_backend
    if preferred:
        return BACKENDS.get(preferred.lower(), preferred)
    return _BY_CATEGORY.get(model_type) or file_backend(source)


def passed_on(words: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """`words` for the engine, without --trust-remote-code unless the `settings` allow it."""
    passed = []
    for flag, _, group in group_flags(words):
        if settings.gpu_trust_remote_code or not is_trust(flag):
            passed += group
    return tuple(passed)


def _requests_trust(fields: Fields) -> bool:
    """Whether the entry with these `fields` allows code from the model's repository to run."""
    if fields.trust_remote_code:
        return True
    flags = group_flags(fields.runtime_args or ())
    values = [(value or "").lower() for flag, value, _ in flags if is_trust(flag)]
    return any(value not in ("false", "0", "no") for value in values)


# -- whether a model can be loaded here ----------------------------------------------------------


def require_loadable(spec: ModelSpec) -> None:
    """Raises ModelDisabled for a disabled model, and LoadFailed if no backend can load the `spec`.

    Called before any model is evicted to make room.
    """
    if not spec.enabled:
        raise ModelDisabled(spec.name)
    because = obstacle(spec)
    if not because:
        return
    install = missing(spec.backend).partition("\n")[2]
    hint = install or f"  What it would take:  %gpu plan {spec.name}"
    raise LoadFailed(
        f"{spec.name} cannot be loaded: {because}.\n{hint}",
        name=spec.name,
        source=spec.source,
        mistake=True,
    )


def obstacle(spec: ModelSpec) -> str:
    """The reason why the model of `spec` cannot be loaded, apart from its size. Empty if it can."""
    return cannot_load(spec) if spec.enabled else "it is disabled in the catalogue"


def cannot_load(spec: ModelSpec) -> str:
    """The reason why no backend of this process can load the model of `spec`. Empty if one can."""
    known = backend_names()
    if spec.backend not in known:
        has = ", ".join(known)
        return f"its backend {spec.backend} is not part of this version, which has {has}"
    return missing(spec.backend).partition("\n")[0].rstrip(".")


def state(spec: ModelSpec) -> str:
    """`ready`, `disabled`, `not found` (there is no such file), or which backend is missing."""
    if not spec.enabled:
        return "disabled"
    if spec.backend not in backend_names():
        return f"no backend {spec.backend} here"
    if cannot_load(spec):
        return f"{spec.backend} is not installed"
    return "not found" if source_absent(spec) else "ready"


def source_absent(spec: ModelSpec) -> str:
    """`there is no PATH` if the source of `spec` is a missing absolute path; else empty."""
    if os.path.isabs(spec.source) and not os.path.exists(spec.source):
        return f"there is no {spec.source}"
    return ""


# -- notes for the person who applies a file -----------------------------------------------------


def notes(entry: CatalogEntry, settings: Settings) -> list[str]:
    """Sentences for the person who applies the `entry`: fields that have no effect in this process,
    and why the model could not be loaded now.
    """
    spec = spec_of(entry, settings)
    fields = Fields.model_validate(entry.body["spec"])
    found = []
    unknown = unknown_fields(entry.body["spec"])
    if unknown:
        found.append(f"unknown here, and kept: {', '.join(unknown)}")
    given = [name for name in OF_LLAMA if getattr(fields, name) is not None]
    if idle := [name for name in given if not _is_option(name, spec.backend)]:
        found.append(f"kept, and not used by {spec.backend}: {', '.join(idle)}")
    if fields.type_k and fields.type_v and fields.type_k != fields.type_v:
        found.append("type_v is kept, and has no effect: the cache has one dtype, that of type_k")
    found += _argument_notes(fields)
    if _requests_trust(fields) and not settings.gpu_trust_remote_code:
        where = "where GPU_TRUST_REMOTE_CODE is off, as it is here"
        found.append(f"{TRUST} is kept, and not passed on {where}")
    return found + _load_notes(spec)


def _argument_notes(fields: Fields) -> list[str]:
    """Notes on the engine's arguments that the placement replaces, or that only the engine reads."""
    flags = [(flag, field) for flag, field, _ in read_arguments(fields.runtime_args or ())]
    placed = [flag for flag, _ in flags if flag in RESERVED_FLAGS]
    unread = [flag for flag, field in flags if not field and flag not in RESERVED_FLAGS]
    for_engine = [flag for flag in unread if not is_trust(flag)]
    found = []
    if placed:
        found.append(f"decided by the placement, and kept: {', '.join(placed)}")
    if for_engine:
        found.append(f"kept for an engine's command line: {', '.join(for_engine)}")
    return found


def _load_notes(spec: ModelSpec) -> list[str]:
    here = os.path.exists(spec.source)
    because = cannot_load(spec)
    if not because:
        absent = spec.source and not here and not looks_like_hub_id(spec.source)
        return [f"{spec.source} does not exist (yet)"] if absent else []
    if spec.backend not in backend_names():
        because = f"this version has no backend {spec.backend}"
    found = [f"planned, and not loaded here: {because}"]
    if spec.size is None and not here:
        found.append("no size is declared and its files are not here; write  memory: 10GiB")
    return found
