"""GGUF files on disk: what their header and tensor table promise.

Only those are read, never a weight, and tokens are stepped over: a vocabulary of 400,000 strings takes a hundredth of
a second. Every promise is checked against the file's size, so that a truncated or hostile file costs one clear error
and no memory.

Format: `GGUF`, a version, the number of tensors and of metadata pairs; the pairs; a row for each tensor (name,
dimensions, type, offset); padding; the data. All little-endian. Source: ggml, docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import LoadFailed
from ...units import MIB

BLOCKS = {  # type -> its name, weights in a block, bytes of a block. Source: ggml, ggml-common.h
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
_LONGEST_HEADER = 256 * MIB
_CHUNK = 4 * MIB
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_LONGEST_LIST = (
    10_000  # of an array that is kept: a number for each layer; longer ones are stepped over
)
_MOST_DIMENSIONS = 8
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class Header(NamedTuple):
    """What a file, or all files of a split one, promise."""

    metadata: dict[str, Any]  # scalars, and arrays of numbers with one for each layer
    weight_bytes: (
        int | None
    )  # None: the file is of a version, or has types, that came after this reader
    file_bytes: int


class _Unknown(Exception):
    """What follows cannot be read: it came after this reader."""


def files(path: Path, name: str) -> list[Path]:
    """The files of the model that this one belongs to: itself, or all parts of `…-00001-of-00003.gguf`.

    Raises LoadFailed naming a part that is not there.
    """
    split = _SPLIT.fullmatch(path.name)
    if split is None:
        return [path]
    parts = [
        path.with_name(f"{split[1]}-{n:05}-of-{split[3]}.gguf") for n in range(1, int(split[3]) + 1)
    ]
    for part in parts:
        if not part.is_file():
            raise _damaged(name, part, f"{path.name} is a part of it, and it is not there")
    return parts


def part_of(path: Path) -> int:
    """Which part of a split model the file is; 0: it is not split."""
    split = _SPLIT.fullmatch(path.name)
    return int(split[2]) if split else 0


def read(path: Path, name: str) -> Header:
    """The header of a model in GGUF, all its parts together.

    Raises LoadFailed, naming the file and what is wrong with it.
    """
    whole = Header({}, 0, 0)
    for part in files(path, name):
        header = _read_one(part, name)
        known = whole.weight_bytes is not None and header.weight_bytes is not None
        weights = whole.weight_bytes + header.weight_bytes if known else None
        whole = Header(
            {**header.metadata, **whole.metadata}, weights, whole.file_bytes + header.file_bytes
        )
    return whole


def _read_one(path: Path, name: str) -> Header:
    try:
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            return _parsed(_Bytes(file, size), size)
    except OSError as error:
        raise _damaged(name, path, error.strerror or str(error)) from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise _damaged(name, path, str(error) or "its header is not one of GGUF") from error


def _parsed(data: _Bytes, size: int) -> Header:
    if data.take(4) != b"GGUF":
        raise ValueError("it does not begin as a GGUF file")
    version = data.number("<I")
    if version >= 1 << 16:
        raise ValueError("it is big-endian, and this machine is not")
    if version not in (2, 3):
        return Header({}, None, size)
    count, pairs = data.number("<Q"), data.number("<Q")
    if count > size or pairs > size:  # each takes more than a byte
        raise ValueError(f"it promises {max(count, pairs):,} entries in {size:,} bytes")
    metadata: dict[str, Any] = {}
    try:
        for _ in range(pairs):
            key = data.string()
            value = data.value(data.number("<I"))
            if value is not None:
                metadata[key] = value
    except _Unknown:
        return Header(metadata, None, size)
    rows = [_row(data) for _ in range(count)]
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= MIB:
        raise ValueError(f"its alignment is {align}")
    start = -(-data.position // align) * align
    return Header(metadata, _weight_bytes(rows, size - start), size)


class Strings(int):
    """How many strings an array has; they themselves were stepped over."""


class _Row(NamedTuple):
    name: str
    kind: int
    weights: int
    offset: int


def _row(data: _Bytes) -> _Row:
    name, dimensions = data.string(), data.number("<I")
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    weights = 1
    for _ in range(dimensions):
        weights *= data.number("<Q")
    return _Row(name, data.number("<I"), weights, data.number("<Q"))


def _weight_bytes(rows: list[_Row], room: int) -> int | None:
    """Bytes of the tensors, by the blocks of their types; None where a type is not known here.

    Raises ValueError where they do not fit into the file.
    """
    total = 0
    for row in rows:
        if row.kind not in BLOCKS:
            return None
        kind, weights, size = BLOCKS[row.kind]
        if row.weights % weights:
            raise ValueError(
                f"{row.name} has {row.weights:,} weights, which are no whole blocks of {kind}"
            )
        taken = row.weights // weights * size
        if row.offset + taken > room:
            beyond = row.offset + taken - room
            raise ValueError(
                f"it is truncated: {row.name} would end {beyond:,} bytes behind its end"
            )
        total += taken
    if total > room or len({row.name for row in rows}) < len(rows):
        raise ValueError("its tensors overlap")
    return total


class _Bytes:
    """A file's beginning, read as far as it is needed."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._most = file, min(size, _LONGEST_HEADER)
        self._data, self.position = b"", 0

    def _need(self, count: int) -> None:
        end = self.position + count
        if end <= len(self._data):
            return
        if end > self._most:
            raise ValueError(
                "it ends in the middle of its header"
                if self._most < _LONGEST_HEADER
                else f"its header is longer than {_LONGEST_HEADER // MIB} MiB"
            )
        more = max(end - len(self._data), _CHUNK, len(self._data))
        more = min(more, self._most - len(self._data))
        self._data += self._file.read(more)
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
        """A scalar, a string, a short array of numbers, how many strings an array has; None for a longer one."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise _Unknown
            return self.number(_SCALARS[kind])
        inner, count = self.number("<I"), self.number("<Q")
        if count > self._most:
            raise ValueError(f"it promises an array of {count:,}")
        if inner == _STRING:
            self._step_over(count)
            return Strings(count)
        if inner not in _SCALARS:
            raise _Unknown
        raw = self.take(count * struct.calcsize(_SCALARS[inner]))
        return (
            list(struct.unpack(f"<{count}{_SCALARS[inner][1]}", raw))
            if count <= _LONGEST_LIST
            else None
        )

    def _step_over(self, count: int) -> None:
        """Passes that many strings. The loop runs half a million times, hence no call in it but the one."""
        unpack, left = struct.Struct("<Q").unpack_from, count
        while left:
            data, at = self._data, self.position
            try:
                for left in range(left, 0, -1):  # noqa: B007, B020 - what is left when the data ends
                    at += 8 + unpack(data, at)[0]
                left = 0
            except (
                struct.error,
                OverflowError,
            ):  # the data ends within a string: more is read, from where it begins
                pass
            self.position = at
            self._need(8 if left else 0)


def _damaged(name: str, path: Path, why: str) -> LoadFailed:
    return LoadFailed(
        f"{name}: {path} cannot be loaded: {why}.", name=name, source=str(path), why=why
    )


# -- as a config ----------------------------------------------------------------------------------------------------

_KEYS = {  # Hugging Face's name -> GGUF's, behind the architecture
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
}
BATCH_TOKENS = 512  # that llama.cpp computes at once, unless it is told otherwise (n_ubatch)
_WRITERS_NOT = ("bert", "t5encoder", "clip")


def config(metadata: dict[str, Any]) -> dict[str, Any]:
    """The header's description of the model by Hugging Face's names, as far as a footprint goes by it."""
    kind = str(metadata.get("general.architecture", ""))
    found = {
        ours: metadata[key]
        for ours, theirs in _KEYS.items()
        if (key := f"{kind}.{theirs}") in metadata
    }
    words = metadata.get("tokenizer.ggml.tokens")
    if isinstance(words, Strings) and "vocab_size" not in found:
        found["vocab_size"] = int(words)
    if "kv_lora_rank" not in found:
        found.pop(
            "qk_rope_head_dim", None
        )  # then it says how much of a head is rotated, which is another thing
    found["model_type"] = kind.replace("-", "_")
    found["batch_tokens"] = BATCH_TOKENS
    found["architectures"] = (
        ["Encoder"] if any(word in kind for word in _WRITERS_NOT) else ["GGUFForCausalLM"]
    )
    return found
