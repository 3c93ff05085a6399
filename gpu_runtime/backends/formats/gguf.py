"""Reads the header and the tensor table of GGUF files on disk.

No weight is read. Token strings are skipped, so a vocabulary of 400,000 strings takes a hundredth
of a second. Every declared size is checked against the file's size. So a truncated or hostile file
causes one clear error, and takes no memory.

The format is: `GGUF`, a version, the number of tensors and of metadata pairs, the pairs, a row for
each tensor (name, dimensions, type, offset), padding, and the data. All numbers are little-endian.
Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ...files import count_fault, open_regular
from ...units import MIB
from .safetensors import Stamp, damaged

BLOCKS = {  # type -> name, weights per block, bytes per block. Source: ggml, ggml-common.h
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
_LONGEST_HEADER = 64 * MIB  # the largest known vocabularies take 20 MiB
_MOST_TENSORS = 100_000
_MOST_STRINGS = 4_000_000  # of all lists of strings together
_CHUNK = 4 * MIB
_SCALARS = {  # metadata type -> format of struct
    **{number: f"<{letter}" for number, letter in enumerate("BbHhIif?")},
    **{number: f"<{letter}" for number, letter in enumerate("Qqd", 10)},
}
_STRING, _ARRAY = 8, 9
_LONGEST_LIST = 10_000  # numbers of an array that is kept (one per layer); others are skipped
_MOST_DIMENSIONS = 8
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufHeader(NamedTuple):
    """What the header of a file declares, or the headers of all parts of a split model."""

    metadata: dict[str, Any]  # scalars, texts, short arrays of numbers, and StringCounts
    weight_bytes: int | None  # None: this reader does not know the file's version or a type in it
    file_bytes: int
    parameters: int = 0  # the number of weights; 0: this reader does not know the file's version


class StringCount(int):
    """The number of strings in an array whose strings were skipped."""


class _TensorRow(NamedTuple):
    """One row of the tensor table."""

    name: str
    type: int
    weights: int
    offset: int


class _Unreadable(Exception):
    """Raised when the rest of the header is of a newer format than this reader knows."""


def files(path: Path, name: str) -> list[Path]:
    """The file `path`, or all parts of the split model `name` to which it belongs.

    Parts are named like `m-00001-of-00003.gguf`. Raises LoadFailed if a part is missing.
    """
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    stem, count = split[1], split[3]
    parts = [path.with_name(f"{stem}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            why = f"{path.name} is a part of the same model, but this file is missing"
            raise damaged(name, part, why)
    return parts


def part_of(path: Path) -> int:
    """The number of the file `path` in a split model, counted from 1; 0 for a model of one file."""
    split = _SPLIT.fullmatch(path.name)
    return int(split[2]) if split else 0


def read(path: Path, name: str) -> GgufHeader:
    """The header of the model in the file `path`. The headers of all its parts are combined.

    Raises LoadFailed for the model `name`, with the file and what is wrong with it.
    """
    whole = GgufHeader({}, 0, 0)
    for part in files(path, name):
        header = _read_file(part, name)
        weight_bytes = None
        if whole.weight_bytes is not None and header.weight_bytes is not None:
            weight_bytes = whole.weight_bytes + header.weight_bytes
        metadata = {**header.metadata, **whole.metadata}
        size, count = whole.file_bytes + header.file_bytes, whole.parameters + header.parameters
        whole = GgufHeader(metadata, weight_bytes, size, count)
    return whole


def _read_file(path: Path, name: str) -> GgufHeader:
    try:
        return _header(Stamp.of(path))
    except OSError as error:
        raise damaged(name, path, error.strerror or str(error)) from error
    except (ValueError, struct.error) as error:
        raise damaged(name, path, str(error) or "its header is not a GGUF header") from error


# One load reads the header three times, and a header with a vocabulary takes 45 ms.
@lru_cache(maxsize=32)
def _header(stamp: Stamp) -> GgufHeader:
    with open_regular(stamp.path) as file:
        return _parse(_HeaderReader(file, stamp.size), stamp.size)


def _parse(data: _HeaderReader, size: int) -> GgufHeader:
    """The header at the start of `data`, a file of `size` bytes. Raises ValueError."""
    if data.take(4) != b"GGUF":
        raise ValueError("it does not begin as a GGUF file")
    version = data.number("<I")
    if version >= 1 << 16:
        raise ValueError("it is big-endian, but this machine is little-endian")
    if version not in (2, 3):
        return GgufHeader({}, None, size)
    tensors, pairs = data.number("<Q"), data.number("<Q")
    if tensors > size or pairs > size:  # each takes more than one byte
        raise ValueError(f"it declares {max(tensors, pairs):,} entries in {size:,} bytes")
    if max(tensors, pairs) > _MOST_TENSORS:
        found = f"{max(tensors, pairs):,} entries"
        raise ValueError(f"it declares {found}, and at most {_MOST_TENSORS:,} are read")
    metadata: dict[str, Any] = {}
    try:
        for _ in range(pairs):
            key = data.string()
            value = data.value(data.number("<I"))
            if value is not None:
                metadata[key] = value
    except _Unreadable:  # a type that is newer than this reader
        return GgufHeader(metadata, None, size)
    if why := count_fault(config(metadata)):
        raise ValueError(why)
    rows = [_tensor_row(data) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= MIB:
        raise ValueError(f"its alignment is {alignment}")
    start = -(-data.position // alignment) * alignment
    count = sum(row.weights for row in rows)
    return GgufHeader(metadata, _weight_bytes(rows, size - start), size, count)


def _tensor_row(data: _HeaderReader) -> _TensorRow:
    name, dimensions = data.string(), data.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    weights = 1
    for _ in range(dimensions):
        weights *= data.number("<Q")
    return _TensorRow(name, data.number("<I"), weights, data.number("<Q"))


def _weight_bytes(rows: list[_TensorRow], data_bytes: int) -> int | None:
    """The bytes of the tensors in `rows`, computed from the block sizes of their types.

    None if this reader does not know the type of a tensor. Raises ValueError if the tensors do not
    fit into the `data_bytes` of the file, or if they overlap.
    """
    total = 0
    for row in rows:
        if row.type not in BLOCKS:
            return None
        type_name, block_weights, block_bytes = BLOCKS[row.type]
        if row.weights % block_weights:
            found = f"{row.name} has {row.weights:,} weights"
            raise ValueError(f"{found}, which are not whole blocks of {type_name}")
        size = row.weights // block_weights * block_bytes
        if row.offset + size > data_bytes:
            beyond = f"{row.offset + size - data_bytes:,} bytes past the end of the file"
            raise ValueError(f"it is truncated: {row.name} would end {beyond}")
        total += size
    if total > data_bytes or len({row.name for row in rows}) < len(rows):
        raise ValueError("its tensors overlap")
    return total


class _HeaderReader:
    """The beginning of a file. Only as much of the file as needed is read."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._most = file, min(size, _LONGEST_HEADER)
        self._data, self.position, self._strings = b"", 0, 0

    def _need(self, count: int) -> None:
        """Reads the file until `count` bytes after the current position are in memory."""
        end = self.position + count
        have = len(self._data)
        if end <= have:
            return
        if end > self._most:
            if self._most < _LONGEST_HEADER:
                raise ValueError("it ends in the middle of its header")
            raise ValueError(f"its header is longer than {_LONGEST_HEADER // MIB} MiB")
        wanted = max(end - have, _CHUNK, have)
        self._data += self._file.read(min(wanted, self._most - have))
        if end > len(self._data):
            raise ValueError("it ends in the middle of its header")

    def take(self, count: int) -> bytes:
        self._need(count)
        start, self.position = self.position, self.position + count
        return self._data[start : self.position]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int) -> Any:
        """A metadata value of type `kind`. Raises _Unreadable for an unknown type.

        An array of numbers becomes a list, or None if it is longer than _LONGEST_LIST. An array of
        strings becomes a StringCount.
        """
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _Unreadable
        return self.number(_SCALARS[kind])

    def _array(self) -> list[Any] | StringCount | None:
        kind, count = self.number("<I"), self.number("<Q")
        if count > self._most:
            raise ValueError(f"it declares an array of {count:,}")
        if kind == _STRING:
            self._strings += count
            if self._strings > _MOST_STRINGS:
                raise ValueError(f"it declares more than {_MOST_STRINGS:,} strings")
            self._skip_strings(count)
            return StringCount(count)
        if kind not in _SCALARS:
            raise _Unreadable
        form = _SCALARS[kind]
        raw = self.take(count * struct.calcsize(form))
        if count > _LONGEST_LIST:
            return None
        return list(struct.unpack(f"<{count}{form[1]}", raw))

    def _skip_strings(self, count: int) -> None:
        """Skips `count` strings, with one call for each: a file may have half a million."""
        unpack, left = struct.Struct("<Q").unpack_from, count
        while left:
            data, at = self._data, self.position
            try:
                for left in range(left, 0, -1):  # noqa: B007, B020 - `left` remains when data ends
                    at += 8 + unpack(data, at)[0]
                left = 0
            except (struct.error, OverflowError):
                pass  # the data ends within a string: read more, then continue with that string
            self.position = at
            self._need(8 if left else 0)


# -- the metadata as a config ----------------------------------------------------------------------

_KEYS = {  # Hugging Face's name -> GGUF's name after the architecture
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "v_head_dim": "attention.value_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "vocab_size": "vocab_size",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "pooling_type": "pooling_type",
}
BATCH_TOKENS = 512  # computed at once by llama.cpp unless n_ubatch is set
_ENCODERS = ("bert", "t5encoder", "clip")


def config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields of the config that a footprint needs, from the `metadata` of a header."""
    architecture = str(metadata.get("general.architecture", ""))
    keys = {name: f"{architecture}.{gguf_name}" for name, gguf_name in _KEYS.items()}
    found = {name: metadata[key] for name, key in keys.items() if key in metadata}
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringCount) and "vocab_size" not in found:
        found["vocab_size"] = int(tokens)
    if "kv_lora_rank" not in found:
        # A model without latent attention uses this field for something else: the number of
        # dimensions of a head that are rotated.
        found.pop("qk_rope_head_dim", None)
    found["model_type"] = architecture.replace("-", "_")
    found["batch_tokens"] = BATCH_TOKENS
    is_encoder = any(word in architecture for word in _ENCODERS)
    found["architectures"] = ["Encoder"] if is_encoder else ["GGUFForCausalLM"]
    return found
