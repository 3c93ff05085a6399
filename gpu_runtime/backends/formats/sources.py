"""What a path, a file or a hub id tells of a model's size, whichever backend may load it. No torch here.

For `plan`, which answers for models that nobody has registered, and for the backends whose sources these are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import LoadFailed, NotAModel
from ...facts import Evidence
from ..base import looks_like_hub_id
from . import gguf, safetensors
from .safetensors import Checkpoint, Stamp

DTYPE_BYTES = {
    "float64": 8,
    "double": 8,
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
}


def evidence(source: str, name: str, options: dict[str, Any] | None = None) -> Evidence:
    """What the source tells. Raises NotAModel where it is no model, LoadFailed for a damaged one."""
    options = options or {}
    item_bytes = DTYPE_BYTES.get(
        str(options.get("dtype", options.get("torch_dtype"))).removeprefix("torch.")
    )
    path = directory(source, name, options.get("revision"))
    if (
        path.is_dir()
        and not (path / "config.json").is_file()
        and (found := sorted(path.glob("*.gguf")))
    ):
        path = only(found, name)
    if path.suffix == ".gguf" and path.is_file():
        return of_gguf(path, name)
    if path.suffix == ".safetensors" and path.is_file():
        return _of_one_file(path, name, item_bytes)
    if path.is_dir() and (pointers := _pointers(path)):
        return pointers
    return of_checkpoint(safetensors.read(path, name), item_bytes)


def directory(source: str, name: str, revision: str | None = None) -> Path:
    """Where the model lies: the path itself, or the hub's local cache. Raises LoadFailed where it is in neither."""
    path = Path(source).expanduser()
    if path.exists() or not looks_like_hub_id(source):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except Exception as error:
        raise LoadFailed(
            f"{name}: {source} is neither a directory (there is no {path.absolute()}) nor a hub id that was "
            f"downloaded. Mend the path, or download it first:  hf download {source}",
            name=name,
            source=source,
        ) from error


def of_checkpoint(checkpoint: Checkpoint, item_bytes: int | None = None) -> Evidence:
    """What a checkpoint's headers tell: its weights once in memory, floating ones as `item_bytes` where given."""
    return Evidence(
        checkpoint.weight_bytes(item_bytes),
        "safetensors header",
        config=checkpoint.config,
        pieces=checkpoint.pieces(),
        fingerprint=_fingerprint(checkpoint.stamps),
    )


def of_gguf(path: Path, name: str) -> Evidence:
    """What a GGUF file, with all its parts, tells. Raises LoadFailed for a damaged one."""
    files = gguf.files(path, name)
    if size := _promised(files):
        return Evidence(
            file_bytes=size, file_format="gguf", why_unknown="its files are pointers to Git LFS"
        )
    header = gguf.read(path, name)
    stamps = _fingerprint(map(Stamp.of, files))
    if header.weight_bytes is None:
        return Evidence(
            file_bytes=header.file_bytes,
            file_format="gguf",
            config=gguf.config(header.metadata),
            fingerprint=stamps,
        )
    return Evidence(
        header.weight_bytes, "GGUF header", config=gguf.config(header.metadata), fingerprint=stamps
    )


def _of_one_file(path: Path, name: str, item_bytes: int | None) -> Evidence:
    if size := _promised([path]):
        return Evidence(file_bytes=size, file_format="safetensors")
    tensors = safetensors.read_header(path, name)
    return of_checkpoint(Checkpoint(path.parent, {}, tensors, (Stamp.of(path),)), item_bytes)


def _pointers(path: Path) -> Evidence | None:
    """What a clone made without Git LFS tells: pointers that say how large the files would be; None for real files."""
    files = sorted(path.glob("*.safetensors"))
    size = _promised(files)
    return Evidence(file_bytes=size, file_format="safetensors") if size else None


def _promised(files: Iterable[Path]) -> int:
    """Bytes of the files that Git LFS pointers stand for, real ones among them counted as they are; 0: none is one."""
    total, pointers = 0, 0
    for file in files:
        size = file.stat().st_size
        if size < 1024 and (text := file.read_bytes()).startswith(
            b"version https://git-lfs.github.com/spec/"
        ):
            said = [
                line.removeprefix(b"size ")
                for line in text.splitlines()
                if line.startswith(b"size ")
            ]
            if said and said[0].isdigit():
                size, pointers = int(said[0]), pointers + 1
        total += size
    return total if pointers else 0


def only(found: list[Path], name: str) -> Path:
    """The one model among these GGUF files; the parts of a split one are one."""
    models = [path for path in found if gguf.part_of(path) in (0, 1)]
    if len(models) == 1:
        return models[0]
    listed = ", ".join(path.name for path in models[:5])
    raise NotAModel(
        f"{found[0].parent} holds {len(models)} models; name the file: {listed}.",
        name=name,
        source=str(found[0].parent),
    )


def _fingerprint(stamps: Iterable[Stamp]) -> str:
    """What tells these files from others, and from themselves once they are changed."""
    told = [
        (os.path.realpath(os.path.dirname(stamp.path)), os.path.basename(stamp.path), *stamp[1:])
        for stamp in stamps
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:32]
