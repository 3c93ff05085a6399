"""Finds the files of safetensors checkpoints on disk, and reads their headers.

Only the length and the JSON header of each file are read, never a weight. Every declared size is
checked against the file's size, because a load maps the file into memory. A read beyond the end of
a truncated file would end the whole process.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...errors import LoadFailed, NotAModel
from ...files import count_fault, json_object, open_regular, read_limited, require_regular_files
from ...units import MIB

ITEM_BITS = {  # dtype -> bits of an element
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}
FLOATING = {"F16", "BF16", "F32", "F64"}  # a load converts these to one dtype
DTYPE_BYTES = {
    **dict.fromkeys(("float64", "double"), 8),
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16"), 2),
}
_STORED = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
# Weights that transformers loads as float32, though the rest of the model is float16: model type ->
# a part of their names. Source: transformers 5, `_keep_in_fp32_modules`; only large ones are here.
_FLOAT32_IN_FLOAT16 = {**dict.fromkeys(("t5", "mt5", "umt5", "udop"), ".wo."), "blip-2": "qformer."}
# Heads, which a load as an embedder leaves out.
_HEADS = ("lm_head.", "cls.", "score.", "classifier.", "vocab_", "lm_predictions.", "qa_outputs.")
_LAYER = re.compile(r"([\w.]*?)\.(\d+)\.")
_BEFORE_LAYERS = re.compile(r"embed|wte|wpe|patch|rotary|shared", re.IGNORECASE)
_EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight"),
    *("shared.weight", "tok_embeddings.weight"),
)
_ALWAYS_TIED = ("t5", "mt5", "umt5")  # their configs use the field for something else
_TIED_BY_DEFAULT = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "mpnet", "gpt2"),
    *("bart", "mbart", "opt", "bloom", "falcon", "gemma", "gemma2", "gemma3_text", "whisper"),
    *("gpt_bigcode", "marian", "pegasus", "cohere", "cohere2", "deberta-v2", "modernbert"),
)
WEIGHTS_FILE = "model.safetensors"
MODULES_FILE = "modules.json"  # in a model that sentence-transformers has saved
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_LONGEST_HEADER = 32 * MIB  # 300,000 tensors in one file
_LONGEST_INDEX = 64 * MIB


class TensorEntry(NamedTuple):
    """A tensor as a header declares it."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def items(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Stamp(NamedTuple):
    """Identifies a version of a file. The stamp differs once the file is changed or replaced."""

    path: str
    size: int
    modified_ns: int
    changed_ns: int  # of the inode: no program can set it, unlike the time of modification
    inode: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of the file `path` as it is now. Raises OSError."""
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


class Checkpoint(NamedTuple):
    """A Hugging Face model directory: its config and what its safetensors headers declare."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    stamps: tuple[Stamp, ...]
    modules: dict[str, TensorEntry] = {}  # of further modules, which an embedder has

    def dtype(self, requested: object) -> str:
        """The dtype to which a load converts the floating-point weights; empty without a config.

        The option `requested` decides, then the config, as in transformers, then the first
        floating-point tensor.
        """
        for wanted in (requested, self.config.get("dtype"), self.config.get("torch_dtype")):
            name = str(wanted).removeprefix("torch.")
            if name in DTYPE_BYTES:
                return name
        stored = [entry.dtype for entry in self.tensors.values() if entry.dtype in FLOATING]
        return _STORED[stored[0]] if stored and self.config else ""

    def weight_bytes(self, dtype: str = "", *, embeds: bool = False) -> int:
        """Bytes of the weights once they are loaded as `dtype` (empty: as stored), tied ones once.

        With `embeds`, the model is loaded without its head, and with its modules in float32.
        """
        modules = self.modules.values() if embeds else ()
        total = sum(entry.items * DTYPE_BYTES["float32"] for entry in modules)
        wide = _FLOAT32_IN_FLOAT16.get(str(self.config.get("model_type")))
        quantised = "quantization_config" in self.config
        for name, entry in self.tensors.items():
            if self._is_tied(name, entry) or (embeds and name.startswith(_HEADS)):
                continue
            small = entry.dtype.startswith("F8_") and self.config and not quantised
            if not dtype or not (entry.dtype in FLOATING or small):
                total += entry.bytes
            elif wide and wide in name and dtype in ("float16", "half"):
                total += entry.items * DTYPE_BYTES["float32"]
            else:
                total += entry.items * DTYPE_BYTES[dtype]
        return total

    @property
    def parameters(self) -> int:
        """The number of weights, tied ones once; 0 if it is not known, since quantised weights are packed."""
        if "quantization_config" in self.config:
            return 0
        kept = (entry for name, entry in self.tensors.items() if not self._is_tied(name, entry))
        return sum(entry.items for entry in kept)

    def _is_tied(self, name: str, entry: TensorEntry) -> bool:
        """Whether the tensor `name` is a second copy of the input embeddings.

        Checkpoints that an older transformers wrote may hold such copies: the output head, and the
        embeddings of encoder and decoder beside `shared.weight`.
        """
        if name.endswith("embed_tokens.weight"):
            shared = [key for key in self.tensors if key.split(".")[-2:] == ["shared", "weight"]]
            return any(self.tensors[key].shape == entry.shape for key in shared)
        if not name.endswith(("lm_head.weight", "cls.predictions.decoder.weight")):
            return False
        if not self._ties_head():
            return False
        return any(
            other.endswith(_EMBEDDINGS) and embedding.shape == entry.shape
            for other, embedding in self.tensors.items()
        )

    def _ties_head(self) -> bool:
        """Whether the output head has the weights of the input embeddings.

        A config that does not say so has the default of its class in transformers.
        """
        kind = str(self.config.get("model_type"))
        if kind in _ALWAYS_TIED:
            return True
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            if "tie_word_embeddings" in config:
                return bool(config["tie_word_embeddings"])
        return kind in _TIED_BY_DEFAULT

    def pieces(self) -> tuple[int, ...]:
        """Bytes of the pieces in order: before the layers, each layer, and after the layers.

        The name of a tensor decides: `model.layers.7.mlp.up_proj.weight` is in the list
        `model.layers` at place 7. Of several lists, the names do not show which runs first. So the
        result is empty unless one list holds at least half of the model, and no other more than 5 %.
        """
        total = self.weight_bytes()
        lists = self._layer_lists()
        sizes = {prefix: sum(layers.values()) for prefix, layers in lists.items()}
        trunk = max(sizes, key=sizes.__getitem__, default="")
        others = [size for prefix, size in sizes.items() if prefix != trunk]
        if sizes.get(trunk, 0) * 2 < total or any(size * 20 > total for size in others):
            return ()
        outside = {
            name: it for name, it in self.tensors.items() if not name.startswith(f"{trunk}.")
        }
        first = {name: it for name, it in outside.items() if _BEFORE_LAYERS.search(name)}
        before = sum(it.bytes for name, it in first.items() if not self._is_tied(name, it))
        layers = lists.get(trunk, {})
        after = total - before - sizes.get(trunk, 0)
        consecutive = (before, *(layers[place] for place in sorted(layers)), after)
        return tuple(size for size in consecutive if size)

    def _layer_lists(self) -> dict[str, dict[int, int]]:
        """Of each list of layers, the bytes of each layer by its place."""
        lists: dict[str, dict[int, int]] = {}
        for name, entry in self.tensors.items():
            found = _LAYER.match(name)
            if found:
                layers = lists.setdefault(found[1], {})
                place = int(found[2])
                layers[place] = layers.get(place, 0) + entry.bytes
        return lists

    @property
    def weight_files(self) -> tuple[str, ...]:
        """The paths of the files with weights."""
        return tuple(stamp.path for stamp in self.stamps if stamp.path.endswith(".safetensors"))

    def unchanged(self) -> bool:
        """Whether each file has the stamp that it had when it was read."""
        try:
            return all(Stamp.of(Path(stamp.path)) == stamp for stamp in self.stamps)
        except OSError:  # a file that was deleted has changed
            return False


def read(directory: Path, name: str) -> Checkpoint:
    """The config and headers of the model `name` in `directory`. Raises NotAModel, and LoadFailed if damaged."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise _no_model(name, directory, "config.json beside *.safetensors,")
    try:
        require_regular_files(directory)
        config = json_object(config_path)
    except OSError as error:
        raise _unreadable(name, error, config_path) from error
    if why := count_fault(config):
        raise damaged(name, config_path, why)
    weight_files = _weight_files(directory, name)
    tensors: dict[str, TensorEntry] = {}
    for path in weight_files:
        tensors.update(read_header(path, name))
    modules, files = _modules(directory, name)
    others = [config_path, directory / "model.safetensors.index.json", directory / MODULES_FILE]
    stamped = [*weight_files, *files, *(path for path in others if path.is_file())]
    stamps = tuple(Stamp.of(path) for path in stamped)
    return Checkpoint(directory, config, tensors, stamps, modules)


def listed_modules(directory: Path) -> list[dict[str, Any]]:
    """The rows of modules.json in `directory`, whose paths are below it. Raises ValueError and OSError."""
    rows = json.loads(read_limited(directory / MODULES_FILE))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{MODULES_FILE} is no list of modules")
    for row in rows:
        path = Path(str(row.get("path", "")))
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the path {path} of its module {row.get('type')} leaves its folder")
    return rows


def _modules(directory: Path, name: str) -> tuple[dict[str, TensorEntry], list[Path]]:
    """The tensors of the modules after the first one that modules.json lists, and their files."""
    if not (directory / MODULES_FILE).is_file():
        return {}, []
    try:
        paths = [str(row.get("path", "")) for row in listed_modules(directory)]
    except (OSError, ValueError, RecursionError):  # each call for a vector names the fault
        return {}, []
    files = [directory / path / WEIGHTS_FILE for path in paths if path]
    files = [file for file in files if file.is_file()]
    found: dict[str, TensorEntry] = {}
    for file in files:
        header = read_header(file, name)
        found |= {f"{file.parent.name}.{key}": entry for key, entry in header.items()}
    return found, files


def read_header(path: Path, name: str) -> dict[str, TensorEntry]:
    """The tensors that the safetensors file `path` declares, by their names.

    Raises LoadFailed for the model `name`, with the file and what is wrong with it.

    The format is: 8 bytes of little-endian header length, a JSON header, then the data. The data
    has no gaps and reaches to the end of the file.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                why = f"it is {size} bytes long, and its header would be {length}"
                raise damaged(name, path, why)
            header = _decoded_header(file.read(length))
    except OSError as error:
        raise _unreadable(name, error, path) from error
    except (RecursionError, ValueError) as error:  # msgspec's errors too
        raise damaged(name, path, "its header is not a safetensors header") from error
    entries = {key: _entry(row) for key, row in header.items()}
    spans = sorted(row.data_offsets for row in header.values())
    why = _span_fault(spans, 8 + length, size)
    if why:
        raise damaged(name, path, why)
    return entries


def _span_fault(spans: Iterable[tuple[int, int]], start: int, size: int) -> str:
    """The fault if the sorted `spans` of the tensors do not fill the file exactly, for an error.

    The data begins at the byte `start`, and the file has `size` bytes.
    """
    end = 0
    for begin, until in spans:
        if begin != end or until < begin:
            return f"its header leaves a gap or an overlap at byte {end} of the data"
        end = until
    if start + end == size:
        return ""
    state = "truncated" if start + end > size else "longer than it should be"
    return f"it is {state}: {size} bytes, but its header declares {start + end}"


class _Row(msgspec.Struct):
    """A tensor in a header. `__metadata__` has other fields, and is no tensor."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (-1, -1)


_HEADER = msgspec.json.Decoder(dict[str, _Row])  # its values take no more memory than their JSON


def _decoded_header(data: bytes) -> dict[str, _Row]:
    """The rows of a header. Raises ValueError if one is impossible, RecursionError if it is too deep."""
    header = _HEADER.decode(data)
    header.pop("__metadata__", None)
    for row in header.values():
        begin, end = row.data_offsets
        if not row.dtype or min((*row.shape, begin, end)) < 0:
            raise ValueError
        entry = _entry(row)
        average_bits = 8 * entry.bytes // max(1, entry.items)
        if entry.items * ITEM_BITS.get(entry.dtype, average_bits) > 8 * entry.bytes:
            raise ValueError
    return header


def _entry(row: _Row) -> TensorEntry:
    return TensorEntry(row.dtype, row.shape, row.data_offsets[1] - row.data_offsets[0])


def _weight_files(directory: Path, name: str) -> list[Path]:
    """The single file with weights in `directory`, or the files that its index lists.

    Raises NotAModel if there are no weights, and LoadFailed for pickled weights or a damaged index.
    """
    single = directory / WEIGHTS_FILE
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index, name)
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise LoadFailed(
            f"{name}: {directory} holds only pickled weights ({pickled[0]}), and unpickling can run "
            f"any code.\n"
            f"  Convert them once with safetensors:  model.save_pretrained(DIRECTORY)",
            name=name,
            source=str(directory),
            mistake=True,
        )
    raise _no_model(name, directory, "model.safetensors or model.safetensors.index.json,")


def _shards(index: Path, name: str) -> list[Path]:
    """The files that the `index` lists. Raises LoadFailed if one is not beside the `index`."""
    try:
        weight_map = _INDEX.decode(read_limited(index, _LONGEST_INDEX)).weight_map
    except OSError as error:
        raise _unreadable(name, error, index) from error
    except (RecursionError, ValueError) as error:
        raise damaged(name, index, "its JSON cannot be read") from error
    if not weight_map:
        raise damaged(name, index, "it has no weight_map")
    directory = index.parent
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        # An index must not lead out of its directory.
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise damaged(name, index, f"it names {shard!r}, which is not a file beside it")
        if not (directory / shard).is_file():
            raise damaged(name, directory / shard, "the index lists it, but the file is missing")
    return [directory / shard for shard in shards]


class _Index(msgspec.Struct):
    """The index of a model in several files."""

    weight_map: dict[str, str] = {}  # tensor -> file


_INDEX = msgspec.json.Decoder(_Index)


def _unreadable(name: str, error: OSError, path: Path) -> LoadFailed:
    return damaged(name, Path(error.filename or path), error.strerror or str(error))


def damaged(name: str, path: Path, why: str) -> LoadFailed:
    """The error that the file `path` of the model `name` cannot be loaded."""
    return LoadFailed(
        f"{name}: {path} cannot be loaded: {why}.",
        name=name,
        source=str(path),
        why=why,
        mistake=True,
    )


def _no_model(name: str, directory: Path, wanted: str) -> NotAModel:
    """The error that `directory` has no `wanted` files; it lists the first five names there."""
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    found = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    text = f"{directory} is not a model: looked for {wanted} and found {found or 'nothing'}."
    return NotAModel(text, name=name, source=str(directory))
