"""The shapes that a file of models may have, and each model in it, checked.

Three shapes are read, in YAML or JSON, several in one file:

    apiVersion: model.aispec.org/v1alpha1      models:               models:
    kind: Model                                  phi-4:                - name: llama3:70b
    metadata: {name: qwen3:8b}                     path: phi-4.gguf      memory: 42949672960
    spec: {memory: 10GB, runtime: ollama}          gpu_layers: -1        runtime: ollama

and a bare mapping that has a name. Inside the house all are the first.

Sources: Helix, Multi-GPU Scheduling, appendix B; Kitchen Brigade, GPU Allocation Semantics, section 4.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import ValidationError

from ..errors import BadDocument
from .documents import Document, Path
from .schema import SAME, Fields, in_words, read_arguments, slips

API_VERSION = "model.aispec.org/v1alpha1"
KINDS = ("Model", "Agent", "AIApp")
LONGEST_NAME = 200


class Manifest(NamedTuple):
    """One model of a file, in the one shape that is kept, and where it stands."""

    name: str
    body: dict[str, Any]  # apiVersion, kind, metadata, spec
    document: Document
    path: Path  # of its spec in the document

    def wrong(self, problem: str, *path: str | int) -> BadDocument:
        return self.document.wrong((*self.path, *path), problem)


# -- reading the shapes -------------------------------------------------------------------------------------------


def manifests(documents: tuple[Document, ...], file: str) -> tuple[Manifest, ...]:
    """Every model that these documents tell of, checked. Raises BadDocument, which names all that is wrong."""
    found: list[Manifest] = []
    wrong: list[BadDocument] = []
    for document in documents:
        for made in _shapes(document):
            (wrong if isinstance(made, BadDocument) else found).append(made)  # type: ignore[arg-type]
    places: dict[str, Manifest] = {}
    for manifest in found:
        wrong += complaints(manifest)
        if (before := places.setdefault(manifest.name, manifest)) is not manifest:
            line = before.document.line(before.path)
            wrong.append(
                manifest.wrong(
                    f"{manifest.name!r} stands in this file twice; the first time in line {line}"
                )
            )
    if not found and not wrong:
        raise BadDocument(file, 1, "", f"there is no model in it. A model is {_EXAMPLE}")
    if wrong:
        raise BadDocument.of(sorted(wrong, key=lambda error: error.line))
    return tuple(found)


_EXAMPLE = f"a document with apiVersion {API_VERSION}, or stands under `models:`"


def _shapes(document: Document) -> Iterator[Manifest | BadDocument]:
    value = document.value
    if isinstance(value, list):  # of documents
        for index, part in enumerate(value):
            yield from _shape(document, part, (index,))
    else:
        yield from _shape(document, value, ())


def _shape(document: Document, value: Any, path: Path) -> Iterator[Manifest | BadDocument]:
    if not isinstance(value, dict):
        yield document.wrong(path, f"this is no model. A model is {_EXAMPLE}")
    elif "apiVersion" in value or "kind" in value:
        yield from _resource(document, value, path)
    elif "models" in value:
        yield from _listed(document, value, path)
    elif {"name", "id"} & value.keys():
        yield _named(document, value, path)
    else:
        close = difflib.get_close_matches("models", value, n=1, cutoff=0.7)
        hint = f" Did you mean models, in place of {close[0]}?" if close else ""
        yield document.wrong(path, f"this is no model: it has no name.{hint} A model is {_EXAMPLE}")


def _resource(
    document: Document, value: dict[str, Any], path: Path
) -> Iterator[Manifest | BadDocument]:
    metadata, spec = value.get("metadata"), value.get("spec")
    version, kind = value.get("apiVersion"), value.get("kind")
    if version != API_VERSION:
        yield document.wrong(
            (*path, "apiVersion"), f"{version!r} is not read here; it must be {API_VERSION}"
        )
    elif kind not in KINDS:
        yield document.wrong(
            (*path, "kind"),
            f"{kind!r} is not read here; it must be {', '.join(KINDS[:-1])} or {KINDS[-1]}",
        )
    elif not isinstance(metadata, dict) or "name" not in metadata:
        yield document.wrong(
            (*path, "metadata"), "the name is missing; write  metadata: {name: NAME}"
        )
    elif problem := bad_name(metadata["name"]):
        yield document.wrong((*path, "metadata", "name"), problem)
    elif not isinstance(spec, dict):
        yield document.wrong((*path, "spec"), "it must be a mapping of fields")
    else:
        yield Manifest(metadata["name"], value, document, (*path, "spec"))


def _listed(
    document: Document, value: dict[str, Any], path: Path
) -> Iterator[Manifest | BadDocument]:
    for other in value.keys() - {"models"}:
        yield document.wrong(
            (*path, other),
            "beside `models` nothing else is read; give it a document of its own "
            "(a line ---), or take it out",
        )
    listed = value["models"]
    if isinstance(listed, list):
        for index, part in enumerate(listed):
            yield _named(document, part, (*path, "models", index))
    elif isinstance(listed, dict):
        for name, part in listed.items():
            here = (*path, "models", name)
            if problem := bad_name(name):
                yield document.wrong(here, problem)
            elif not isinstance(part, dict):
                yield document.wrong(here, "it must be a mapping of fields, such as  {path: FILE}")
            else:
                yield Manifest(name, _body(name, part), document, here)
    else:
        yield document.wrong((*path, "models"), "it must be a mapping of names, or a list")


def _named(document: Document, part: Any, path: Path) -> Manifest | BadDocument:
    if not isinstance(part, dict):
        return document.wrong(path, "it must be a mapping of fields, with a name")
    key = "name" if "name" in part else "id"
    if key not in part:
        return document.wrong(path, "its name is missing; write  name: NAME")
    if problem := bad_name(part[key]):
        return document.wrong((*path, key), problem)
    return Manifest(
        part[key],
        _body(part[key], {field: said for field, said in part.items() if field != "name"}),
        document,
        path,
    )


def _body(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": KINDS[0], "metadata": {"name": name}, "spec": spec}


def bad_name(name: Any) -> str:
    """What is wrong with a name; empty where nothing is.

    >>> bad_name("Qwen/Qwen3:8b"), bad_name("a@b")
    ('', "'a@b' cannot be a name: '@' parts a name from a process")
    """
    if not isinstance(name, str):
        return f"{name!r} is not text; put it in quotes"
    if not name.strip() or name != name.strip():
        return f"{name!r} cannot be a name: it is empty, or has spaces around it"
    if "@" in name:
        return f"{name!r} cannot be a name: '@' parts a name from a process"
    if len(name) > LONGEST_NAME or not name.isprintable():
        return f"{name[:40]!r} cannot be a name: it must be at most {LONGEST_NAME} printable characters"
    return ""


# -- checking the fields ------------------------------------------------------------------------------------------


def complaints(manifest: Manifest) -> list[BadDocument]:
    """All that is wrong with its fields."""
    wrong = [
        manifest.wrong(
            f"{unknown} is not a known field; did you mean {nearest}? (What is yours alone is kept under "
            f"a name like x-{unknown})",
            unknown,
        )
        for unknown, nearest in slips(manifest.body["spec"])
    ]
    try:
        fields = Fields.model_validate(manifest.body["spec"])
    except ValidationError as error:
        for complaint in error.errors():
            field = str(complaint["loc"][0])
            wrong.append(manifest.wrong(in_words(complaint), field))
        return wrong
    for same in SAME:
        said = {name: value for name in same if (value := getattr(fields, name)) is not None}
        if len(set(said.values())) > 1:
            names = list(said)
            wrong.append(
                manifest.wrong(
                    f"{' and '.join(names)} mean the same, and say different things", names[1]
                )
            )
    if isinstance(fields.gpus, int) and fields.gpus > (fields.max_tensor_parallel or fields.gpus):
        wrong.append(
            manifest.wrong(f"{fields.gpus} GPUs are more than max_tensor_parallel allows", "gpus")
        )
    try:
        list(read_arguments(fields.runtime_args or ()))
    except ValueError as error:
        wrong.append(manifest.wrong(str(error).rstrip("."), "runtime_args"))
    return wrong
