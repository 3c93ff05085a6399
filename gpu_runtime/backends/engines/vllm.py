"""vLLM: `vllm serve`. It takes its part of each card when it starts, whatever the model needs, and keeps it.

Source: vLLM, CLI reference, `vllm serve`.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from .recipe import (
    Command,
    Order,
    as_it_was_told,
    nothing_to_do,
    of_its_files,
    own_arguments,
    own_template,
    path_or_name,
    said_already,
)

HEALTH = "/health"
BASE = "/v1"
LAYOUT = "balanced"  # tensor parallelism: equal parts
KEYED = True
LEAST, MOST = 0.01, 0.99
evidence, source, prepare, misplaced = of_its_files, path_or_name, nothing_to_do, as_it_was_told


def missing() -> str:
    return (
        ""
        if shutil.which("vllm")
        else "there is no command vllm here.\n  Install it:  pip install vllm"
    )


def model(order: Order) -> str:
    return order.spec.name


def utilization(order: Order) -> float:
    """The part of each card that it may take: of several cards the smallest, since it takes as much of all.

    Rounded down, so that it stays within its share.
    """
    part = min(share.bytes / order.totals[share.device] for share in order.shares)
    return min(MOST, max(LEAST, math.floor(part * 10_000) / 10_000))


def command(order: Order) -> Command:
    spec, own = order.spec, own_arguments(order.spec)
    options = {"context_length": order.config.get("context_at_load"), **spec.options}
    words = [
        "serve",
        order.source,
        "--host",
        "127.0.0.1",
        "--port",
        str(order.port),
        "--served-model-name",
        spec.name,
        "--gpu-memory-utilization",
        f"{utilization(order):g}",
    ]
    if not said_already(own, "--tensor-parallel-size", "-tp"):
        words += ["--tensor-parallel-size", str(len(order.shares))]
    for option, flags in (
        ("context_length", ("--max-model-len",)),
        ("dtype", ("--dtype",)),
        ("revision", ("--revision",)),
        ("cache_dtype", ("--kv-cache-dtype",)),
    ):
        if options.get(option) is not None and not said_already(own, *flags):
            words += [flags[0], str(options[option])]
    if (chat := own_template(spec)) and not said_already(
        own, "--chat-template"
    ):  # requests may bring none
        words += ["--chat-template", chat]
    if options.get("trust_remote_code") and not said_already(own, "--trust-remote-code"):
        words += ["--trust-remote-code"]
    return Command((shutil.which("vllm") or "vllm", *words, *own), {"VLLM_API_KEY": order.key})


def template(order: Order) -> str | None:
    """As transformers saves it: in a file of its own, or in the tokenizer's."""
    own, config = (
        Path(order.source, "chat_template.jinja"),
        Path(order.source, "tokenizer_config.json"),
    )
    try:
        if own.exists():
            return own.read_text()
        said = json.loads(config.read_text()).get("chat_template") if config.exists() else None
    except (OSError, ValueError, AttributeError):  # vLLM says what is wrong with it
        return None
    return said if isinstance(said, str) else None
