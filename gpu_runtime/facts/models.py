"""Facts about a model: its specification, its footprint and its measurements."""

from __future__ import annotations

from typing import Any

from ..safe_text import lines
from ..units import show_bytes
from .base import NORMAL, Value, importance_name


class Part(Value):
    """One part of a footprint, and the source of its number."""

    name: str  # "weights", "kv_cache", "activations", "room", "margin", "context", "all"
    bytes: int
    # "declared", "measured on …", "safetensors header", "GGUF header", "shapes", "config", "name", …
    source: str
    # How the number was calculated: `32 layers × 8 KV heads × 128 × 2 × 8192 tokens, 16 bits`.
    detail: str = ""

    @property
    def for_use(self) -> bool:
        """Whether this part is memory that the model's code uses while it runs."""
        return self.name in ("kv_cache", "activations", "room")


class Footprint(Value):
    """The bytes that a model needs on a device, part by part; made by `gpu_runtime.estimation`."""

    parts: tuple[Part, ...]
    # Number of attention heads, which the number of tensor-parallel cards must divide. 0: unknown.
    heads: int = 0
    # The bytes of each piece, in order: embeddings, layer 0…n, head. A model on several cards is
    # divided between two pieces. The pieces sum to `bytes`, overheads included. If there are no
    # pieces, the model may be divided at any byte.
    pieces: tuple[int, ...] = ()
    notes: tuple[
        str, ...
    ] = ()  # sentences about parts that are not counted, and about earlier measurements
    # Whether cache and working memory are allocated together with the weights, so that these bytes
    # count as the model's own bytes.
    at_load: bool = False

    @property
    def bytes(self) -> int:
        """The sum of all parts."""
        return sum([part.bytes for part in self.parts])

    @classmethod
    def of(cls, size: int, source: str = "declared") -> Footprint:
        """A footprint of one part of `size` bytes; `source` names where the number is from."""
        return cls((Part("all", size, source),))

    @property
    def working_bytes(self) -> int:
        """The bytes of the parts `for_use`, claimed while the model is on a device; 0 for `at_load`."""
        if self.at_load:
            return 0
        return sum(part.bytes for part in self.parts if part.for_use)


class Evidence(Value):
    """The facts about a model's size that its source shows before anything is loaded."""

    weight_bytes: int | None = None  # size in memory; None: the source does not show it
    # Where the size was read: "safetensors header", "GGUF header", "shapes", "module"
    source: str = ""
    file_bytes: int = 0  # size of the source's files, if nothing else is known
    file_format: str = ""  # format of those files: gguf or safetensors
    name: str = ""  # name of the source's file or repository, which may contain the size
    config: dict[str, Any] = {}  # the model's config, with Hugging Face's names
    pieces: tuple[int, ...] = ()  # weights of the consecutive pieces between which it may be split
    fingerprint: str = ""  # identifies the content of the source; empty if unknown
    why_unknown: str = ""  # why the size is unknown
    # Whether the engine allocates cache and working memory when it loads the model, so that these
    # bytes are measured together with the weights.
    at_load: bool = False
    parameters: int = 0  # the number of weights; 0: the source does not show it


class Measurement(Value):
    """The memory that a model used after it was loaded, as measured."""

    resident_bytes: int  # size of the model's storages
    # The largest number of bytes during load and use; None: not measured
    peak_bytes: int | None = None
    day: str = ""  # in the form 2026-11-21
    device: str = ""  # a card's name
    name: str = ""  # the model's name, for people who read the file


class Declared(Value):
    """The facts that an owner publishes about a model that it can load."""

    bytes: int = 0  # its declared size; 0: none was declared
    importance: int = NORMAL


UNDECLARED = Declared()


class ModelSpec(Value):
    """The specification of a model before it is loaded. It contains no secrets and no code."""

    name: str
    backend: str
    source: str = ""  # a directory, a file or a hub id; empty for a live Python object
    size: int | None = None  # declared bytes
    model_type: str = "other"  # llm, embedding, reranker, vision, diffusion, other
    quantization: str = ""
    importance: int = NORMAL
    keep: bool = False
    keep_alive: float = 0.0
    layout: str = "auto"
    devices: tuple[str, ...] = ()  # devices on which it may be placed; empty: any
    placement: dict[str, Any] = {}  # fields of PlacementRules that the model overrides
    enabled: bool = True  # False: the model is listed, but a load is refused
    # Options for its backend and its estimate: context_length, gpu_layers, dtype, …
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        size = "size unknown" if self.size is None else show_bytes(self.size)
        kept = ", kept" if self.keep else ""
        source = f", from {self.source}" if self.source else ""
        rank = "" if self.importance == NORMAL else f", {importance_name(self.importance)}"
        return lines(f"{self.name}: {self.backend}, {size}{rank}{kept}{source}")

    @property
    def key(self) -> str:
        """`type:name:quantization`, the name of a model in the HTTP API and the logs."""
        return f"{self.model_type}:{self.name}:{self.quantization or 'none'}"
