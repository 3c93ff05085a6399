"""Safetensors checkpoints on disk: which files there are, and what their headers promise.

Only the length and the JSON header of each file are read, never a weight; and every promise is checked against the
file's size, since a truncated file that is mapped into memory would end the process instead of the load.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import LoadFailed, NotAModel
from ...units import MIB

ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
FLOATING = {"F16", "BF16", "F32", "F64"}  # what a dtype override converts
_LAYER = re.compile(r"([\w.]*?)\.(\d+)\.")
_IN_FRONT = re.compile(r"embed|wte|wpe|patch|rotary|shared", re.IGNORECASE)
_LONGEST_HEADER = 100 * MIB  # as the format itself limits it


class Entry(NamedTuple):
    """A tensor as a header promises it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def items(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count


class Stamp(NamedTuple):
    """What tells a file from one that was changed or replaced since."""

    path: str
    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)


class Checkpoint(NamedTuple):
    """A Hugging Face model directory, as far as its headers tell."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Entry]
    stamps: tuple[Stamp, ...]

    def weight_bytes(self, item_bytes: int | None = None) -> int:
        """Bytes of the weights once loaded, floating ones as `item_bytes` where given. Tied weights count once."""
        return sum(
            entry.items * item_bytes if item_bytes and entry.dtype in FLOATING else entry.bytes
            for name, entry in self.tensors.items()
            if not self._tied(name, entry)
        )

    def _tied(self, name: str, entry: Entry) -> bool:
        if not (name.endswith("lm_head.weight") and self.config.get("tie_word_embeddings", False)):
            return False
        return any(
            other.endswith(
                ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
            )
            and there.shape == entry.shape
            for other, there in self.tensors.items()
        )

    def pieces(self) -> tuple[int, ...]:
        """Bytes of what lies before the layers, of each layer, and of what lies behind them; nothing where no single
        list of layers holds most of the model, since names do not tell the order of several.

        By the tensors' names alone: `model.layers.7.mlp.up_proj.weight` is of the list `model.layers`, in place 7.
        """
        layers: dict[str, dict[int, int]] = {}
        for name, entry in self.tensors.items():
            if found := _LAYER.match(name):
                places = layers.setdefault(found[1], {})
                places[int(found[2])] = places.get(int(found[2]), 0) + entry.bytes
        total = self.weight_bytes()
        trunk = max(layers, key=lambda prefix: sum(layers[prefix].values()), default="")
        inside = layers.get(trunk, {})
        if (
            sum(inside.values()) * 2 < total
            or len(layers) > 1
            and any(
                sum(places.values()) * 20 > total
                for prefix, places in layers.items()
                if prefix != trunk
            )
        ):
            return ()
        front = sum(
            entry.bytes
            for name, entry in self.tensors.items()
            if not name.startswith(f"{trunk}.")
            and _IN_FRONT.search(name)
            and not self._tied(name, entry)
        )
        behind = total - front - sum(inside.values())
        return tuple(
            size for size in (front, *(inside[place] for place in sorted(inside)), behind) if size
        )

    def unchanged(self) -> bool:
        """Whether the files are those that were read: same size, time of change and inode."""
        try:
            return all(Stamp.of(Path(stamp.path)) == stamp for stamp in self.stamps)
        except OSError:
            return False


def read(directory: Path, name: str) -> Checkpoint:
    """The directory's config and headers. Raises NotAModel where it is no model, LoadFailed naming a damaged file."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise NotAModel(
            f"{directory} is no model: looked for config.json beside *.safetensors, and found "
            f"{_listing(directory)}.",
            name=name,
            source=str(directory),
        )
    config = _json(config_path, config_path.read_bytes(), name)
    files = _weight_files(directory, name)
    tensors: dict[str, Entry] = {}
    for path in files:
        tensors.update(read_header(path, name))
    extra = [
        path for path in (config_path, directory / "model.safetensors.index.json") if path.is_file()
    ]
    return Checkpoint(
        directory, config, tensors, tuple(Stamp.of(path) for path in (*files, *extra))
    )


def read_header(path: Path, name: str) -> dict[str, Entry]:
    """The tensors that a safetensors file promises. Raises LoadFailed, naming the file and what is wrong with it.

    Format: 8 bytes of little-endian header length, a JSON header, then the data, without gaps, to the end of the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise _damaged(
                    name, path, f"it is {size} bytes long, and its header would be {length}"
                )
            header = _json(path, file.read(length), name)
    except OSError as error:
        raise _damaged(name, path, error.strerror or str(error)) from error
    header.pop("__metadata__", None)
    try:
        entries = {key: _entry(fields) for key, fields in header.items()}
        spans = sorted(tuple(fields["data_offsets"]) for fields in header.values())
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _damaged(name, path, "its header is not one of safetensors") from error
    end = 0
    for begin, until in spans:
        if begin != end or until < begin:
            raise _damaged(
                name, path, f"its header leaves a gap or an overlap at byte {end} of the data"
            )
        end = until
    if end != size - 8 - length:
        cut = "truncated" if end > size - 8 - length else "longer than it should be"
        raise _damaged(
            name, path, f"it is {cut}: {size} bytes, where its header promises {8 + length + end}"
        )
    return entries


def _entry(fields: dict[str, Any]) -> Entry:
    begin, end = fields["data_offsets"]
    entry = Entry(fields["dtype"], tuple(fields["shape"]), end - begin)
    if any(type(number) is not int or number < 0 for number in (*entry.shape, begin, end)):
        raise ValueError
    if (
        entry.items * ITEM_BITS.get(entry.dtype, 8 * entry.bytes // max(1, entry.items))
        > 8 * entry.bytes
    ):
        raise ValueError
    return entry


def _weight_files(directory: Path, name: str) -> list[Path]:
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        mapped = _json(index, index.read_bytes(), name).get("weight_map")
        if not isinstance(mapped, dict) or not mapped:
            raise _damaged(name, index, "it has no weight_map")
        shards = sorted({str(shard) for shard in mapped.values()})
        for shard in shards:
            if Path(shard).name != shard or shard in (
                "",
                ".",
                "..",
            ):  # an index must not lead out of its directory
                raise _damaged(name, index, f"it names {shard!r}, which is not a file beside it")
            if not (directory / shard).is_file():
                raise _damaged(name, directory / shard, "the index names it, and it is not there")
        return [directory / shard for shard in shards]
    pickled = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickled:
        raise LoadFailed(
            f"{name}: {directory} holds only pickled weights ({pickled[0]}), and unpickling can run any "
            f"code.\n"
            f"  Convert them once with safetensors:  model.save_pretrained(DIRECTORY)",
            name=name,
            source=str(directory),
        )
    raise NotAModel(
        f"{directory} is no model: looked for model.safetensors or model.safetensors.index.json, and found "
        f"{_listing(directory)}.",
        name=name,
        source=str(directory),
    )


def _json(path: Path, data: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise _damaged(name, path, "its JSON cannot be read") from error
    if not isinstance(value, dict):
        raise _damaged(name, path, "its JSON is not an object")
    return value


def _damaged(name: str, path: Path, why: str) -> LoadFailed:
    return LoadFailed(
        f"{name}: {path} cannot be loaded: {why}.", name=name, source=str(path), why=why
    )


def _listing(directory: Path) -> str:
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    return ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
