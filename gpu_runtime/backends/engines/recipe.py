"""Engines that are servers of their own and speak OpenAI's HTTP: one recipe a file, one line here for each.

A recipe is a module. It tells how its server is started for a lease, when it is ready, and what it calls the model; it
starts nothing and asks nothing itself. What is common to all (ports, health, restarts, logs, the end) is `server.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from ...facts import Evidence, ModelSpec, Shares

USUAL_CONTEXT = 8192  # tokens, where nobody asks for more and the model knows as many

Ask = Callable[
    [str, str, Any], tuple[int, Any]
]  # method, path and JSON body -> status (0: no answer) and JSON


class Order(NamedTuple):
    """What a server is started for."""

    spec: ModelSpec
    shares: Shares
    totals: Mapping[str, int]  # bytes of each of its cards
    source: str  # the file or directory, or the engine's own name for the model
    port: int
    simulated: bool  # its cards are; then it computes on the CPU
    key: str  # that callers must show; the environment carries it, since a command line can be read by everybody
    config: Mapping[str, Any] = {}  # of the model, as far as its source tells it


class Command(NamedTuple):
    """A command line, and what its environment has beyond this process's."""

    words: tuple[str, ...]
    environment: dict[str, str] = {}


class Recipe(Protocol):
    """What an engine's module defines. Written down here for whoever adds one; modules are not instances."""

    HEALTH: str  # the path that answers 200 once it is ready
    BASE: str  # what comes before /chat/completions
    LAYOUT: str  # how it is split where a model does not say: balanced for tensor parallelism
    KEYED: bool  # whether it lets in only whoever shows the key

    @staticmethod
    def evidence(spec: ModelSpec) -> Evidence:
        """What its source tells of what the engine will take. Raises NotAModel, LoadFailed."""
        ...

    @staticmethod
    def missing() -> str:
        """What has to be installed first, in a sentence; empty where all is there."""
        ...

    @staticmethod
    def source(spec: ModelSpec) -> str:
        """What the engine is to open: a file, a directory or its own name for the model."""
        ...

    @staticmethod
    def command(order: Order) -> Command:
        """How it is started. Pure."""
        ...

    @staticmethod
    def model(order: Order) -> str:
        """What requests call the model."""
        ...

    @staticmethod
    def template(order: Order) -> str | None:
        """The model's own chat template, where requests may switch it (`chat_template_kwargs`); "": they may not, None:
        it is not known here."""
        ...

    @staticmethod
    def prepare(order: Order, ask: Ask) -> None:
        """What is still to be done once it answers, such as loading the model. Raises LoadFailed."""
        ...

    @staticmethod
    def misplaced(order: Order, ask: Ask) -> str:
        """Why the model does not lie where it should; empty where it does."""
        ...


def of_its_files(spec: ModelSpec) -> Evidence:
    """What the files tell, where they lie here. The engine takes room for a context when it starts, asked or not."""
    from ..missing import AbsentBackend

    found = AbsentBackend(spec.backend).evidence(spec)
    known = {**found.config, **(found.config.get("text_config") or {})}.get(
        "max_position_embeddings"
    )
    tokens = spec.options.get("context_length") or (
        min(known, USUAL_CONTEXT) if isinstance(known, int) else 0
    )
    takes = {"context_at_load": tokens} if tokens else {}
    return msgspec.structs.replace(found, at_load=True, config={**found.config, **takes})


def path_or_name(spec: ModelSpec) -> str:
    """The whole path of what lies here; else the engine's own name for it."""
    path = os.path.expanduser(spec.source)
    return os.path.abspath(path) if os.path.exists(path) else spec.source


def nothing_to_do(order: Order, ask: Ask) -> None:
    """For engines that are done when they answer."""


def as_it_was_told(order: Order, ask: Ask) -> str:
    """For engines that take the cards they are given, or fail."""
    return ""


def switched_by_nobody(order: Order) -> str:
    """For engines whose requests say nothing to a chat template."""
    return ""


def own_template(spec: ModelSpec) -> str | None:
    """The chat template that takes the place of the model's own; a file's path where it is one."""
    return spec.options.get("chat_template") or None


def own_arguments(spec: ModelSpec) -> tuple[str, ...]:
    """The model's `runtime_args`, without those that the lease decides.

    >>> words = ["--seed", "1", "--gpu-memory-utilization", "1"]
    >>> own_arguments(ModelSpec("a", "vllm", options={"runtime_args": words}))
    ('--seed', '1')
    """
    from .arguments import OURS, grouped

    words = tuple(str(word) for word in spec.options.get("runtime_args", ()))
    return tuple(word for flag, _, took in grouped(words) if flag not in OURS for word in took)


def said_already(words: tuple[str, ...], *flags: str) -> bool:
    """Whether the model's own arguments have one of these flags; then ours is left out."""
    return any(word.partition("=")[0] in flags for word in words)
