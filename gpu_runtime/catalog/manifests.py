"""The three formats of a file of models, and the check of each model in the file.

A file may mix the formats, in YAML or JSON:

    apiVersion: model.aispec.org/v1alpha1      models:               models:
    kind: Model                                  phi-4:                - name: llama3:70b
    metadata: {name: qwen3:8b}                     path: phi-4.gguf      memory: 42949672960
    spec: {memory: 10GB, runtime: ollama}          gpu_layers: -1        runtime: ollama

From left to right: the first format is a resource as in Kubernetes. The second is a mapping from
the models' names to their fields. In the third format, each model is a mapping of fields that
includes its name (or its id); such a mapping may also be a whole document, or be in a list at the
top. All models are converted to the first format.

Sources: Helix, Multi-GPU Scheduling, appendix B; Kitchen Brigade, GPU Allocation Semantics, section
4.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import BadDocument
from ..kinds import bad_name
from ..safe_text import quoted
from .documents import Document, Path
from .fields import contradictions, misspelled_fields, read_arguments, read_fields

API_VERSION = "model.aispec.org/v1alpha1"
KINDS = ("Model", "Agent", "AIApp")
_EXAMPLE = f"a document with apiVersion {API_VERSION}, or an entry under `models:`"


class Manifest(NamedTuple):
    """One model of a file, converted to the first format, and its place in the file."""

    name: str
    body: dict[str, Any]  # apiVersion, kind, metadata, spec
    document: Document
    path: Path  # path of the model's spec in the document

    def wrong(self, problem: str, *path: str | int) -> BadDocument:
        """The error for a `problem` at this `path`, which begins at the manifest's spec."""
        return self.document.wrong((*self.path, *path), problem)


Found = Manifest | BadDocument  # a model, or the error if it cannot be read

# -- reading the formats -------------------------------------------------------------------------


def manifests(documents: tuple[Document, ...], file: str) -> tuple[Manifest, ...]:
    """Every model of the `documents` of a `file`, of which there must be one, with checked fields.

    Raises BadDocument with all errors, in the order of their lines.
    """
    every = [one for document in documents for one in _in_document(document)]
    found = [one for one in every if isinstance(one, Manifest)]
    errors = [one for one in every if isinstance(one, BadDocument)]
    if not found and not errors:
        raise BadDocument(file, 1, "", f"there is no model in it. A model is {_EXAMPLE}")
    for manifest in found:
        errors += complaints(manifest)
    errors += _repeated(found)
    if errors:
        raise BadDocument.of(sorted(errors, key=lambda error: error.line))
    return tuple(found)


def _repeated(found: list[Manifest]) -> Iterator[BadDocument]:
    """An error for each model that has the same name as an earlier model of the file."""
    first: dict[str, Manifest] = {}
    for manifest in found:
        before = first.setdefault(manifest.name, manifest)
        if before is not manifest:
            line = before.document.line(before.path)
            yield manifest.wrong(
                f"{manifest.name!r} appears twice in this file; the first time in line {line}"
            )


def _in_document(document: Document) -> Iterator[Found]:
    value = document.value
    is_list = isinstance(value, list)
    for index, part in enumerate(value if is_list else [value]):
        yield from _in_value(document, part, (index,) if is_list else ())


def _in_value(document: Document, value: Any, path: Path) -> Iterator[Found]:
    if not isinstance(value, dict):
        yield document.wrong(path, f"this is no model. A model is {_EXAMPLE}")
    elif "apiVersion" in value or "kind" in value:
        yield _resource(document, value, path)
    elif "models" in value:
        yield from _in_list(document, value, path)
    elif {"name", "id"} & value.keys():
        yield _named(document, value, path)
    else:
        close = difflib.get_close_matches("models", value, n=1, cutoff=0.7)
        hint = f" Did you mean models, in place of {close[0]}?" if close else ""
        yield document.wrong(path, f"this is no model: it has no name.{hint} A model is {_EXAMPLE}")


def _resource(document: Document, value: dict[str, Any], path: Path) -> Found:
    """The model in a document of the first format."""
    field, problem = _resource_problem(value)
    if problem:
        return document.wrong((*path, *field), problem)
    return Manifest(value["metadata"]["name"], value, document, (*path, "spec"))


def _resource_problem(value: dict[str, Any]) -> tuple[Path, str]:
    """The path of the first wrong field in `value`, a document of the first format, and the problem.

    The fields inside its spec are not checked here.
    """
    if value.get("apiVersion") != API_VERSION:
        version = value.get("apiVersion")
        problem = "it is missing" if version is None else f"{quoted(version)} is not supported"
        return ("apiVersion",), f"{problem}; it must be {API_VERSION}"
    if value.get("kind") not in KINDS:
        return ("kind",), (
            f"{quoted(value.get('kind'))} is not supported; it must be {', '.join(KINDS[:-1])} "
            f"or {KINDS[-1]}"
        )
    metadata = value.get("metadata")
    if not isinstance(metadata, dict) or "name" not in metadata:
        return ("metadata",), "the name is missing; write  metadata: {name: NAME}"
    problem = bad_name(metadata["name"])
    if problem:
        return ("metadata", "name"), problem
    if not isinstance(value.get("spec"), dict):
        return ("spec",), "it must be a mapping of fields"
    return (), ""


def _in_list(document: Document, value: dict[str, Any], path: Path) -> Iterator[Found]:
    """The models under `models:`, which contains a mapping from names to fields, or a list."""
    for other in value.keys() - {"models"}:
        yield document.wrong(
            (*path, other),
            "only `models` is read here; put this in a document of its own (a line ---), or remove "
            "it",
        )
    listed = value["models"]
    if isinstance(listed, list):
        for index, part in enumerate(listed):
            yield _named(document, part, (*path, "models", index))
    elif isinstance(listed, dict):
        for name, part in listed.items():
            yield _under_name(document, name, part, (*path, "models", name))
    else:
        yield document.wrong((*path, "models"), "it must be a mapping of names, or a list")


def _under_name(document: Document, name: Any, part: Any, path: Path) -> Found:
    """A model in a mapping from names to fields."""
    problem = bad_name(name)
    if problem:
        return document.wrong(path, problem)
    if not isinstance(part, dict):
        return document.wrong(path, "it must be a mapping of fields, such as  {path: FILE}")
    return Manifest(name, _body(name, part), document, path)


def _named(document: Document, part: Any, path: Path) -> Found:
    """The model in the mapping `part`. Its name is `name`, or `id` if `name` is missing."""
    if not isinstance(part, dict):
        return document.wrong(path, "it must be a mapping of fields, with a name")
    key = "name" if "name" in part else "id"
    if key not in part:
        return document.wrong(path, "its name is missing; write  name: NAME")
    name = part[key]
    problem = bad_name(name)
    if problem:
        return document.wrong((*path, key), problem)
    spec = {field: value for field, value in part.items() if field != "name"}
    return Manifest(name, _body(name, spec), document, path)


def _body(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KINDS[0], "metadata": {"name": name}, "spec": spec}


# -- checking the fields -------------------------------------------------------------------------


def complaints(manifest: Manifest) -> list[BadDocument]:
    """An error for each wrong field of the `manifest`, or else for each contradiction of fields."""
    errors = [
        manifest.wrong(
            f"{unknown} is not a known field; did you mean {nearest}? (Fields of your own are kept "
            f"under a name like x-{unknown})",
            unknown,
        )
        for unknown, nearest in misspelled_fields(manifest.body["spec"])
    ]
    values, wrong = read_fields(manifest.body["spec"])
    if not wrong:
        wrong = list(contradictions(values))
        gpus, most = values.get("gpus"), values.get("max_tensor_parallel")
        if isinstance(gpus, int) and gpus > (most or gpus):
            wrong.append(("gpus", f"{gpus} GPUs are more than max_tensor_parallel allows"))
        try:
            list(read_arguments(values.get("runtime_args", ())))
        except ValueError as error:
            wrong.append(("runtime_args", str(error).rstrip(".")))
    return errors + [manifest.wrong(problem, field) for field, problem in wrong]
