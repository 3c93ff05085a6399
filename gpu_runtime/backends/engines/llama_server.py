"""llama.cpp's own server, `llama-server`; where that is not installed, llama-cpp-python's (`python -m
llama_cpp.server`).

Sources: llama.cpp, tools/server/README; llama-cpp-python, server/settings.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from ...errors import LoadFailed
from ...facts import ModelSpec
from ..formats import gguf
from ..llama_cpp.options import (
    arguments,
    context_tokens,
    flash_attention,
    gguf_evidence,
    gguf_file,
    gpu_layers,
)
from .recipe import (
    Command,
    Order,
    as_it_was_told,
    nothing_to_do,
    own_arguments,
    own_template,
    said_already,
)

HEALTH = "/v1/models"  # both answer it, and only once the model is loaded
BASE = "/v1"
LAYOUT = "proportional"
KEYED = True
ALL_LAYERS = "999"  # every version takes a number that is too large; only newer ones take `all`
evidence, prepare, misplaced = gguf_evidence, nothing_to_do, as_it_was_told


def source(spec: ModelSpec) -> str:
    return str(gguf_file(spec))


def missing() -> str:
    if shutil.which("llama-server") or importlib.util.find_spec("llama_cpp"):
        return ""
    return "neither llama-server nor llama-cpp-python is installed.\n  Install one:  pip install 'gpu-console[llama]'"


def model(order: Order) -> str:
    return order.spec.name


def command(order: Order) -> Command:
    native = shutil.which("llama-server")
    return _native(order, native) if native else _python(order)


def _native(order: Order, executable: str) -> Command:
    spec, own = order.spec, own_arguments(order.spec)
    layers = gpu_layers(spec)
    words = [
        "--model",
        order.source,
        "--alias",
        spec.name,
        "--host",
        "127.0.0.1",
        "--port",
        str(order.port),
    ]
    if not said_already(own, "--ctx-size", "-c"):
        words += ["--ctx-size", str(context_tokens(spec, dict(order.config)))]
    if not said_already(own, "--n-gpu-layers", "--gpu-layers", "-ngl"):
        words += ["--n-gpu-layers", ALL_LAYERS if layers < 0 else str(layers)]
    if not said_already(own, "--parallel", "-np"):
        words += ["--parallel", str(spec.options.get("sequences") or 1)]
    told = arguments(spec, order.shares, order.source, dict(order.config), None)
    if len(order.shares) > 1:
        words += [
            "--split-mode",
            spec.options.get("split_mode", "layer"),
            "--main-gpu",
            str(told["main_gpu"]),
            "--tensor-split",
            ",".join(f"{part:g}" for part in told["tensor_split"]),
        ]
    if (dtype := spec.options.get("cache_dtype")) and not said_already(
        own, "--cache-type-k", "-ctk"
    ):
        words += ["--cache-type-k", dtype, "--cache-type-v", dtype]
    if flash_attention(spec) and not said_already(own, "--flash-attn", "-fa"):
        words += ["--flash-attn", "on"]
    if told["embedding"]:
        words += ["--embedding"]
    if not said_already(
        own, "--jinja", "--no-jinja"
    ):  # else it knows a few templates by heart, and no switches
        words += ["--jinja"]
    if (chat := own_template(spec)) and not said_already(
        own, "--chat-template", "--chat-template-file"
    ):
        words += ["--chat-template" if "{" in chat else "--chat-template-file", chat]
    return Command((executable, *words, *own), {"LLAMA_API_KEY": order.key})


def template(order: Order) -> str:
    """That of its file; llama-cpp-python's server lets nobody switch it."""
    if not shutil.which("llama-server"):
        return ""
    said = gguf.read(Path(order.source), order.spec.name).metadata.get("tokenizer.chat_template")
    return said if isinstance(said, str) else ""


def _python(order: Order) -> Command:
    if own_template(order.spec):
        why = "llama-cpp-python's server takes no chat template but the model's own"
        raise LoadFailed(
            f"{order.spec.name} cannot be loaded: {why}.\n"
            f"  Install llama-server, or leave its runtime out: llama_cpp takes one.",
            name=order.spec.name,
            source=order.source,
            why=why,
        )
    told = arguments(order.spec, order.shares, order.source, dict(order.config), None)
    words = [
        "--model",
        order.source,
        "--model_alias",
        order.spec.name,
        "--host",
        "127.0.0.1",
        "--port",
        str(order.port),
        "--n_ctx",
        str(told["n_ctx"]),
        "--n_gpu_layers",
        str(told["n_gpu_layers"]),
        "--main_gpu",
        str(told["main_gpu"]),
        "--split_mode",
        str(told["split_mode"]),
    ]
    if split := told.get("tensor_split"):
        words += ["--tensor_split", *(f"{part:g}" for part in split)]
    for name in ("type_k", "type_v"):
        if name in told:
            words += [f"--{name}", str(told[name])]
    for name in ("flash_attn", "embedding"):
        if told[name]:
            words += [f"--{name}", "true"]
    return Command((sys.executable, "-m", "llama_cpp.server", *words), {"API_KEY": order.key})
