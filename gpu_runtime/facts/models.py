"""What is known about a model: its specification and its footprint."""

from __future__ import annotations

from typing import Any

from .base import NORMAL, Value


class Part(Value):
    """One part of a footprint, and where its number came from."""

    name: str  # "weights", "kv_cache", "activations", "room", "margin", "context", "all"
    bytes: int
    source: str  # "declared", "measured on …", "safetensors header", "GGUF header", "shapes", "config", "name", …
    detail: str = (
        ""  # how it was reckoned: `32 layers × 8 KV heads × 128 × 2 × 8192 tokens, 16 bits`
    )

    @property
    def for_use(self) -> bool:
        """Whether it is room that the model's code takes while it runs, and that its lease keeps for it."""
        return self.name in ("kv_cache", "activations", "room")


class Footprint(Value):
    """The bytes that a model needs on a device, part by part. How they are found: `estimate.py`."""

    parts: tuple[Part, ...]
    heads: int = (
        0  # attention heads, which a tensor-parallel degree must divide; 0: unknown, any degree
    )
    # Bytes of the indivisible consecutive pieces that the model may be cut between when it goes over several cards:
    # embeddings, layer 0…n, head. They sum to `bytes`, overheads included. Empty: it may be cut at any byte.
    pieces: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # sentences: what is not counted, and what was measured before
    at_load: bool = False  # cache and work space are taken with the weights, and are as much the model's own bytes

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @classmethod
    def of(cls, size: int, source: str = "declared") -> Footprint:
        return cls((Part("all", size, source),))

    @property
    def working_bytes(self) -> int:
        """Of these, room for use: it holds no weights, and stays claimed as long as the model is on a device."""
        return 0 if self.at_load else sum(part.bytes for part in self.parts if part.for_use)


class Evidence(Value):
    """What a model's source tells of its size, nothing of it loaded."""

    weight_bytes: int | None = (
        None  # once in memory; None: it cannot be told from the source itself
    )
    source: str = ""  # where that was read: "safetensors header", "GGUF header", "shapes", "module"
    file_bytes: int = 0  # of its files, where nothing but their size is known
    file_format: str = ""  # of those: gguf or safetensors
    name: str = ""  # of its file or repository, which may tell its size too
    config: dict[str, Any] = {}  # by Hugging Face's names
    pieces: tuple[int, ...] = ()  # weights of the consecutive pieces that it may be cut between
    fingerprint: str = ""  # of the source as it is now; empty: it could not be told from another
    why_unknown: str = ""  # what went wrong, where it cannot be told
    at_load: bool = False  # its engine takes cache and work space when it loads, so they are measured with the weights


class Measurement(Value):
    """What a model was seen to take, once it had been loaded."""

    resident_bytes: int  # of its storages
    peak_bytes: int | None = None  # the most, while it was loaded and used; None: not seen
    day: str = ""  # as 2026-11-21
    device: str = ""  # a card's name
    name: str = ""  # the model's, for whoever reads the file


class ModelSpec(Value):
    """What is known of a model before it is loaded. No secrets, no code."""

    name: str
    backend: str
    source: str = ""  # a directory, a file or a hub id; empty for what came from live Python
    size: int | None = None  # declared bytes
    model_type: str = "other"  # llm, embedding, reranker, vision, diffusion, other
    quantization: str = ""
    importance: int = NORMAL
    keep: bool = False
    keep_alive: float = 0.0
    layout: str = "auto"
    devices: tuple[str, ...] = ()  # where it may go; empty: anywhere
    placement: dict[str, Any] = {}  # fields of PlacementRules on which the model has its own word
    enabled: bool = True  # False: it is known, and refuses to load
    options: dict[
        str, Any
    ] = {}  # what its backend and its estimate go by: context_length, gpu_layers, dtype, …

    @property
    def key(self) -> str:
        """`type:name:quantization`, as the HTTP face and the logs name a model."""
        return f"{self.model_type}:{self.name}:{self.quantization or 'none'}"
