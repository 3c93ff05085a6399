"""Fields of a model are declared in GROUPS of `arguments.py`; this file reads the entry of a catalogue with them.

From one entry it makes the ModelSpec of a process, in the project's units: sizes in bytes, durations in
seconds. An unknown field is kept, unless it looks like a misspelled known field, which is an error.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import files
from ..arguments import (
    BACKENDS,
    DTYPE,
    FIELDS,
    KEYWORDS,
    LAYERS,
    LLAMA,
    OPTIONS,
    PROGRAM,
    PYTHON,
    TOKENS,
    WORD,
    program_mistake,
    takes,
)
from ..backends.base import looks_like_hub_id
from ..backends.engines.recipe import RESERVED_FLAGS, group_flags, is_placeholder
from ..backends.registry import backend_names, file_backend, missing
from ..errors import LoadFailed, ModelDisabled
from ..facts import ModelSpec, Value
from ..settings import Settings

# The fields that a file may have, in the order of the docs.
KNOWN = {name: field for name, field in FIELDS.items() if field.only_in != PYTHON}


def read_fields(spec: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values of the known fields that `spec` sets, and pairs of a wrong field and its problem."""
    values: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    for name, field in KNOWN.items():
        if spec.get(name) is None:
            continue
        try:
            values[name] = field.rule.in_file(spec[name])
        except ValueError as error:
            wrong.append((name, str(error).rstrip(".")))
    return values, wrong


def problems(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of a field in `spec` and its problem: misspelled, wrong, or in contradiction to another field.

    An unknown field that is like no known field, or whose name starts with `x-`, is no problem.

    >>> [field for field, _ in problems({"memroy": 1, "colour": "red", "x-memroy": 2})]
    ['memroy']
    """
    for unknown in unknown_fields(spec):
        word = unknown.lower().replace("-", "_")
        close = difflib.get_close_matches(word, KNOWN, n=1, cutoff=0.8)
        if close and not word.startswith("x_"):
            advice = f"(Fields of your own are kept under a name like x-{unknown})"
            yield unknown, f"{unknown} is not a known field; did you mean {close[0]}? {advice}"
    values, wrong = read_fields(spec)
    if wrong:
        yield from wrong
        return
    for meaning in dict.fromkeys(field.same_as or name for name, field in KNOWN.items()):
        names = [name for name in values if meaning in (name, KNOWN[name].same_as)]
        if names[1:] and len({values[name] for name in names}) > 1:
            yield names[1], f"{' and '.join(names)} mean the same, and have different values"
    backend = values.get("runtime") or values.get("backend") or ""
    mistaken, expected = program_mistake(backend, values)
    if mistaken:
        yield mistaken, f"it must be {expected}"
    gpus, most = values.get("gpus"), values.get("max_tensor_parallel")
    if isinstance(gpus, int) and gpus > (most or gpus):
        yield "gpus", f"{gpus} GPUs are more than max_tensor_parallel allows"
    try:
        list(read_arguments(values.get("runtime_args", ())))
    except ValueError as error:
        yield "runtime_args", str(error).rstrip(".")


def unknown_fields(spec: Mapping[str, Any]) -> list[str]:
    """The fields of the `spec` that no file may have."""
    return [field for field in spec if field not in KNOWN]


# -- an engine's arguments ----------------------------------------------------------------------


def _tokens(text: str) -> int:
    """A number of tokens as vLLM accepts it: 32768, 32k (times 1000), or 32K (times 1024).

    The letters m and M stand for 1000² and 1024². Raises ValueError.
    """
    match = re.fullmatch(r"([0-9]{1,12})([kKmM]?)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens")
    scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}[match[2]]
    return TOKENS.convert(int(match[1]) * scale)


# --max-num-seqs and --parallel are not in this table. The sequences that they allow share the
# reserved context, so they need no more memory.
_ARGUMENTS: dict[str, tuple[str, Callable[[str], Any]]] = {  # flag -> its field, and its reader
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c"), ("context_length", _tokens)),
    "--dtype": ("dtype", DTYPE.in_file),
    **dict.fromkeys(("--quantization", "-q"), ("quantization", WORD.in_file)),
    "--revision": ("revision", str),
    **dict.fromkeys(
        ("--n-gpu-layers", "--gpu-layers", "-ngl"),
        ("gpu_layers", lambda text: LAYERS.convert(int(text))),
    ),
    **dict.fromkeys(
        ("--kv-cache-dtype", "--cache-type-k", "-ctk"),
        ("cache_dtype", lambda text: None if text == "auto" else text),
    ),
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), ("max_tensor_parallel", int)),
}
TRUST = "--trust-remote-code"


def read_arguments(words: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yields each flag of `words` with its field and its value, None for a flag without a value.

    The field is empty for an unknown flag, and for a value that is a placeholder such as `{port}`.

    >>> list(read_arguments(("--max-model-len", "32k", "--trust-remote-code", "--seed=1")))
    [('--max-model-len', 'context_length', 32000), ('--trust-remote-code', '', None), ('--seed', '', '1')]

    Raises ValueError if a value is missing or cannot be read.
    """
    for flag, value, _ in group_flags(words):
        field, read = _ARGUMENTS.get("" if is_placeholder(value) else flag, ("", str))
        if field and value is None:
            raise ValueError(f"{flag} needs a value")
        try:
            yield flag, field, None if value is None else read(value)
        except ValueError as error:
            raise ValueError(f"{flag} {value}: {error}") from None


def is_trust(flag: str) -> bool:
    """Whether `flag` is --trust-remote-code. Engines also accept underscores and abbreviations.

    >>> is_trust("--trust_remote_code"), is_trust("--trust"), is_trust("--seed")
    (True, True, False)
    """
    return len(flag) > 2 and TRUST.startswith(flag.lower().replace("_", "-"))


# -- an entry, and its specification -------------------------------------------------------------

# The options that only llama.cpp reads; an entry of another engine keeps them without effect.
OF_LLAMA = [name for name in OPTIONS if {*LLAMA} >= {*FIELDS[name].backends} > set()]
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
    fields = _fields(entry)
    values = _values(fields, settings)
    source = values.get("source") or fields.get("id") or entry.name
    backend = _backend(values, settings, source)
    gpus = fields.get("gpus")
    options = _options(values, settings, backend)
    if backend in PROGRAM and (weak := files.weak_step(Path(entry.file))):
        options["refused"] = f"its commands are in {entry.file}, and {weak}"
    own = {name: values[name] for name in KEYWORDS if name in values and name != "backend"}
    return ModelSpec(
        name=entry.name,
        backend=backend,
        source="" if backend in ("fake", *PROGRAM) else source,
        devices=gpus if isinstance(gpus, tuple) else (),
        placement=_placement(values, gpus if isinstance(gpus, int) else None),
        enabled=fields.get("enabled", True),
        options=options,
        **own,
    )


def _fields(entry: CatalogEntry) -> dict[str, Any]:
    """The values of the known fields of the `entry`. Raises ValueError if the entry is damaged."""
    fields, wrong = read_fields(entry.body["spec"])
    if wrong:
        raise ValueError(" ".join(wrong[0]))
    return fields


def _values(fields: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The `fields` under one name for each meaning, with the values of arguments for the engine."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values.setdefault(FIELDS[name].same_as or name, value)
    for _, field, value in read_arguments(fields.get("runtime_args", ())):
        if field:
            values[field] = value
    cache_dtypes = (values.get("cache_dtype"), fields.get("type_k"), fields.get("type_v"))
    values["cache_dtype"] = next(filter(None, cache_dtypes), None)
    values.setdefault("gpu_layers", settings.inference_gpu_layers)
    return {name: value for name, value in values.items() if value is not None}


def _options(values: Mapping[str, Any], settings: Settings, backend: str) -> dict[str, Any]:
    """The options of the model's `backend`."""
    used = [name for name in OPTIONS if name not in OF_LLAMA or takes(backend, name)]
    options = {name: values[name] for name in used if name in values}
    if "chat_template" in options:
        options["chat_template"] = _template(options["chat_template"])
    if words := options.pop("runtime_args", ()):
        options["runtime_args"] = list(passed_on(words, settings))
    options.pop("trust_remote_code", None)
    if settings.gpu_trust_remote_code and _requests_trust(values):
        options["trust_remote_code"] = True
    return options


def _placement(values: Mapping[str, Any], cards: int | None) -> dict[str, Any]:
    """The fields of PlacementRules in the `values` of an entry that asks for this number of `cards`."""
    rules = {
        "least_cards": cards,
        "most_cards": cards or values.get("max_tensor_parallel"),
        "card_bytes": values.get("gpu_memory"),
        "factor": values.get("gpu_fraction_factor"),
        "largest_fraction": values.get("fraction_largest_possible"),
    }
    return {name: value for name, value in rules.items() if value is not None}


def _template(given: str) -> str:
    """The text of a chat template: `given` itself if it has a brace, else the content of this file."""
    if "{" in given:
        return given
    try:
        return files.read_text(os.path.expanduser(given), MOST_TEMPLATE)
    except OSError:  # the use of the template raises the error
        return given


def _backend(values: Mapping[str, Any], settings: Settings, source: str) -> str:
    """The backend of the entry, else of INFERENCE_BACKEND, else by the type of model or the files."""
    if "backend" in values:
        return values["backend"]
    preferred = settings.inference_backend
    if preferred:
        return BACKENDS.get(preferred.lower(), preferred)
    return _BY_CATEGORY.get(values.get("model_type", "")) or file_backend(source)


def passed_on(words: tuple[str, ...], settings: Settings) -> tuple[str, ...]:
    """`words` for the engine, without --trust-remote-code unless the `settings` allow it."""
    passed = []
    for flag, _, group in group_flags(words):
        if settings.gpu_trust_remote_code or not is_trust(flag):
            passed += group
    return tuple(passed)


def _requests_trust(fields: Mapping[str, Any]) -> bool:
    """Whether the entry with these `fields` allows code from the model's repository to run."""
    if fields.get("trust_remote_code"):
        return True
    flags = group_flags(fields.get("runtime_args", ()))
    values = [(value or "").lower() for flag, value, _ in flags if is_trust(flag)]
    return any(value not in ("false", "0", "no") for value in values)


# -- whether a model can be loaded here ----------------------------------------------------------


def require_loadable(spec: ModelSpec) -> None:
    """Raises ModelDisabled, or LoadFailed if no backend can load the `spec`, before any model is evicted."""
    if not spec.enabled:
        raise ModelDisabled(spec.name)
    because = obstacle(spec)
    if not because:
        return
    install = missing(spec.backend).partition("\n")[2]
    hint = install or f"  What it would take:  %gpu plan {shlex.quote(spec.name)}"
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
    """Sentences for the person who applies the `entry`: what has no effect here, and why it cannot be loaded now."""
    spec = spec_of(entry, settings)
    fields = _fields(entry)
    found = []
    unknown = unknown_fields(entry.body["spec"])
    if unknown:
        found.append(f"unknown here, and kept: {', '.join(unknown)}")
    given = [name for name in OF_LLAMA if name in fields]
    if idle := [name for name in given if not takes(spec.backend, name)]:
        found.append(f"kept, and not used by {spec.backend}: {', '.join(idle)}")
    if len({fields[name] for name in ("type_k", "type_v") if name in fields}) == 2:
        found.append("type_v is kept, and has no effect: the cache has one dtype, that of type_k")
    found += _argument_notes(fields.get("runtime_args", ()))
    if _requests_trust(fields) and not settings.gpu_trust_remote_code:
        where = "where GPU_TRUST_REMOTE_CODE is off, as it is here"
        found.append(f"{TRUST} is kept, and not passed on {where}")
    return found + _load_notes(spec)


def _argument_notes(words: tuple[str, ...]) -> list[str]:
    """Notes on the `words` for the engine that the placement replaces, or that only the engine reads."""
    flags = [(flag, field) for flag, field, _ in read_arguments(words)]
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
