"""Finds what a path, a file or a hub id shows about a model's size, for every backend.

`rt.plan` uses this module for models that are not registered, and backends use it for their
sources. The module imports no torch and loads nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...errors import GpuError, LoadFailed, NotAModel
from ...facts import Evidence, ModelSpec
from ...files import json_object, read_text
from ...threads import import_whole
from ..base import Backend, looks_like_hub_id
from . import gguf, safetensors
from .safetensors import Checkpoint, Stamp

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LARGEST_POINTER = 1024  # bytes


def evidence(
    source: str, name: str, options: Mapping[str, Any] | None = None, model_type: str = ""
) -> Evidence:
    """What the `source` of the model `name` shows about its size.

    Only the `options` `dtype`, `task` and `revision` are used. Raises NotAModel,
    and LoadFailed for a damaged source, or a hub id that was not downloaded.
    """
    options = options or {}
    path = directory(source, name, options.get("revision"))
    if holds_gguf(path):
        path = only(sorted(path.glob("*.gguf")), name)
    if path.suffix == ".gguf" and path.is_file():
        return of_gguf(path, name)
    if path.suffix == ".safetensors" and path.is_file():
        if not (path.parent / "config.json").is_file():
            return _of_one_file(path, name, options)
        path = path.parent  # a load reads the whole directory
    # In a clone without Git LFS, each file of weights is a small text with the real file's size.
    pointed_bytes = _bytes_behind_pointers(sorted(path.glob("*.safetensors")))
    if pointed_bytes:
        return Evidence(file_bytes=pointed_bytes, file_format="safetensors")
    return of_checkpoint(safetensors.read(path, name), options, model_type)


def template(source: str, name: str, revision: str | None = None) -> str | None:
    """The chat template that the `source` of the model `name` has, if it can be read.

    transformers saves it in a file of its own or in the tokenizer's config.
    """
    try:
        path = directory(source, name, revision)
        own_file, config_file = path / "chat_template.jinja", path / "tokenizer_config.json"
        if own_file.is_file():
            return read_text(own_file)
        if config_file.is_file():
            found = json_object(config_file).get("chat_template")
        else:
            if holds_gguf(path):
                path = only(sorted(path.glob("*.gguf")), name)
            found = gguf.read(path, name).metadata.get("tokenizer.chat_template")
    except (OSError, ValueError, AttributeError, GpuError):  # the load reports the fault
        return None
    return found if isinstance(found, str) else None


def holds_gguf(path: Path) -> bool:
    """Whether `path` is a directory with GGUF files and without a Hugging Face model."""
    if not path.is_dir() or (path / "config.json").is_file():
        return False
    return any(path.glob("*.gguf"))


def directory(source: str, name: str, revision: str | None = None) -> Path:
    """The local path of the model `name`: `source`, or a hub id's directory in the hub's cache.

    `revision` selects the version of a hub id. Nothing is downloaded. Raises LoadFailed for a hub id
    that is not in the cache, and if a file of the model is a link to a missing file.
    """
    path = Path(source).expanduser()
    if os.path.lexists(path) or not looks_like_hub_id(source):
        _require_linked(path, name, source)
        return path
    import_whole("huggingface_hub", "snapshot_download")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise LoadFailed(
            f"{name}: {source} is no directory (there is no {path.absolute()}), and huggingface_hub, which finds "
            "the files of a hub id, is not installed.\n  Install it:  pip install 'gpu-console[transformers]'",
            name=name,
            source=source,
            mistake=True,
        ) from None
    try:
        path = Path(snapshot_download(source, revision=revision, local_files_only=True))
    except Exception as error:
        what = f" in the revision {revision}" if revision is not None else ""
        option = f" --revision {revision}" if revision is not None else ""
        raise LoadFailed(
            f"{name}: {source} is neither a directory (there is no {path.absolute()}) nor a hub id that was "
            f"downloaded{what}. Correct the path, or download it first:  hf download {source}{option}",
            name=name,
            source=source,
            mistake=True,
        ) from error
    _require_linked(path, name, source)
    return path


def _require_linked(path: Path, name: str, source: str) -> None:
    """Raises LoadFailed if `path`, or a file in it that a load reads, is a link to a missing file.

    The hub's cache has such links after a part of it was deleted.
    """
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        is_read = file == path or file.suffix in (".safetensors", ".gguf", ".json")
        if is_read and file.is_symlink() and not file.exists():
            raise LoadFailed(
                f"{name}: {file} cannot be loaded: it is a link to {os.readlink(file)}, which is missing.",
                name=name,
                source=source,
                mistake=True,
            )


def of_checkpoint(
    checkpoint: Checkpoint, options: Mapping[str, Any], model_type: str = ""
) -> Evidence:
    """What the headers of a `checkpoint` show about the model's size after its load.

    The config of the result states the dtype of the load, so that the cache of a context has it too.
    """
    dtype = checkpoint.dtype(options.get("dtype"))
    config = checkpoint.config
    return Evidence(
        checkpoint.weight_bytes(dtype, embeds=embeds(options, model_type)),
        "safetensors header",
        config={**config, "dtype": dtype} if dtype and config else config,
        pieces=checkpoint.pieces(),
        fingerprint=_fingerprint(checkpoint.stamps),
        parameters=checkpoint.parameters,
    )


def embeds(options: Mapping[str, Any], model_type: str) -> bool:
    """Whether a model is loaded without its head, and with the modules of sentence-transformers."""
    task = options.get("task")
    return task == "feature-extraction" or (task is None and model_type == "embedding")


def of_gguf(path: Path, name: str) -> Evidence:
    """What the GGUF file `path` of the model `name` shows about the model's size.

    All parts of a split model count. Raises LoadFailed for a damaged file.
    """
    files = gguf.files(path, name)
    pointed_bytes = _bytes_behind_pointers(files)
    if pointed_bytes:
        why = "its files are pointers to Git LFS"
        return Evidence(file_bytes=pointed_bytes, file_format="gguf", why_unknown=why)
    header = gguf.read(path, name)
    known = {
        "config": gguf.config(header.metadata),
        "fingerprint": _fingerprint(map(Stamp.of, files)),
        "parameters": header.parameters,
    }
    if header.weight_bytes is None:
        return Evidence(file_bytes=header.file_bytes, file_format="gguf", **known)
    return Evidence(header.weight_bytes, "GGUF header", **known)


def only(found: list[Path], name: str) -> Path:
    """The first file of the single model, whole or split, among the GGUF files `found`.

    Raises NotAModel for the model `name` if the files belong to several models.
    """
    models = [path for path in found if gguf.part_of(path) in (0, 1)]
    if len(models) == 1:
        return models[0]
    if not models:
        gguf.files(found[0], name)  # raises, because the first part is missing
    listed = ", ".join(path.name for path in models[:5])
    raise NotAModel(
        f"{found[0].parent} holds {len(models)} models; name the file: {listed}.",
        name=name,
        source=str(found[0].parent),
    )


def _of_one_file(path: Path, name: str, options: Mapping[str, Any]) -> Evidence:
    pointed_bytes = _bytes_behind_pointers([path])
    if pointed_bytes:
        return Evidence(file_bytes=pointed_bytes, file_format="safetensors")
    tensors = safetensors.read_header(path, name)
    return of_checkpoint(Checkpoint(path.parent, {}, tensors, (Stamp.of(path),)), options)


def _bytes_behind_pointers(files: Iterable[Path]) -> int:
    """The bytes of `files`, a Git LFS pointer as the file that it stands for; 0 without pointers."""
    pointed = {file: _pointed_bytes(file) for file in files}
    if all(size is None for size in pointed.values()):
        return 0
    return sum(file.stat().st_size if size is None else size for file, size in pointed.items())


def _pointed_bytes(file: Path) -> int | None:
    """The size that the Git LFS pointer `file` states; None if `file` is no pointer."""
    if not file.is_file() or file.stat().st_size >= _LARGEST_POINTER:
        return None
    text = file.read_bytes()
    if not text.startswith(_LFS_POINTER):
        return None
    for line in text.splitlines():
        if line.startswith(b"size "):
            size = line.removeprefix(b"size ")
            return int(size) if size.isdigit() else None
    return None


def _fingerprint(stamps: Iterable[Stamp]) -> str:
    """A digest of `stamps`. It differs once one of their files is changed or replaced."""
    places = ((os.path.split(stamp.path), stamp) for stamp in stamps)
    identities = [(os.path.realpath(where), name, *stamp[1:]) for (where, name), stamp in places]
    return hashlib.sha256(repr(identities).encode()).hexdigest()[:32]


# -- a backend that reads the size of a model from its source, and never loads a model
#
# This backend stands in for a backend that this version lacks. Dry runs and the backends of engines
# use it to read a source without opening another backend. It imports no torch.


class AbsentBackend(Backend):
    """Reads the size of a model from its source. It never loads a model."""

    can_move = False

    def __init__(self, name: str) -> None:
        self.name = name

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        """What the local files of `spec` show about the model's size; without them, their name.

        Raises LoadFailed if local files exist but their size cannot be read.
        """
        is_local = os.path.lexists(os.path.expanduser(spec.source))
        if not is_local and not looks_like_hub_id(spec.source):
            absent = (
                f"there is no {os.path.abspath(spec.source)}"
                if spec.source
                else "no source is given"
            )
            return Evidence(name=spec.source, why_unknown=absent)
        try:
            return evidence(spec.source, spec.name, spec.options, spec.model_type)
        except LoadFailed as error:
            if is_local:
                raise
            reason = str(error).removeprefix(f"{spec.name}: ").rstrip(".")
            return Evidence(name=spec.source, why_unknown=reason)

    def load(self, spec: ModelSpec, *_: Any, **__: Any) -> NoReturn:
        """Always raises LoadFailed."""
        raise LoadFailed(
            f"{spec.name} cannot be loaded: its backend {self.name} is not part of this version.",
            name=spec.name,
            source=spec.source,
            mistake=True,
        )
