"""Ollama: `ollama serve`, a server of its own for each model, that keeps that one loaded.

It decides by itself how much of a model goes to the card, so it is asked (`/api/ps`), and started again where some of
it lies elsewhere. Models must have been pulled: nothing is downloaded here. It knows no key: whoever is on this machine
may ask it. Sources: Ollama, docs/api and envconfig/config.go; Helix, Multi-GPU Scheduling, 5.3.
"""

from __future__ import annotations

import shutil

from ...errors import LoadFailed
from ...units import show_bytes
from .recipe import Ask, Command, Order, of_its_files, path_or_name, switched_by_nobody

HEALTH = "/api/version"
BASE = "/v1"
LAYOUT = "proportional"
KEYED = False
evidence, source, template = of_its_files, path_or_name, switched_by_nobody
FOR_EVER = -1


def missing() -> str:
    return (
        ""
        if shutil.which("ollama")
        else "there is no command ollama here.\n  Install it from ollama.com"
    )


def model(order: Order) -> str:
    return order.source


def command(order: Order) -> Command:
    options = order.spec.options
    environment = {
        "OLLAMA_HOST": f"127.0.0.1:{order.port}",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_KEEP_ALIVE": str(FOR_EVER),
        "OLLAMA_NUM_PARALLEL": str(options.get("sequences") or 1),
    }
    if len(order.shares) > 1:
        environment["OLLAMA_SCHED_SPREAD"] = "1"
    if options.get("context_length"):
        environment["OLLAMA_CONTEXT_LENGTH"] = str(options["context_length"])
    if options.get("cache_dtype"):
        environment |= {
            "OLLAMA_KV_CACHE_TYPE": str(options["cache_dtype"]),
            "OLLAMA_FLASH_ATTENTION": "1",
        }
    return Command((shutil.which("ollama") or "ollama", "serve"), environment)


def prepare(order: Order, ask: Ask) -> None:
    """Loads the model: a request without a prompt does just that."""
    body = {"model": order.source, "keep_alive": FOR_EVER, "stream": False}
    layers = order.spec.options.get("gpu_layers")
    if layers is not None and layers >= 0:
        body["options"] = {"num_gpu": layers}
    status, said = ask("POST", "/api/generate", body)
    if status == 404:
        raise LoadFailed(
            f"{order.spec.name} cannot be loaded: Ollama has no model {order.source}.\n"
            f"  Pull it:  ollama pull {order.source}",
            name=order.spec.name,
            source=order.source,
        )
    if status != 200:
        why = said.get("error", said) if isinstance(said, dict) else said
        raise LoadFailed(
            f"{order.spec.name} cannot be loaded: Ollama said {status}: {why}.",
            name=order.spec.name,
            source=order.source,
        )


def misplaced(order: Order, ask: Ask) -> str:
    """Some of it in RAM, though all of it was to go to the card. A model that asks for so many layers is left alone."""
    layers = order.spec.options.get("gpu_layers")
    if order.simulated or (layers is not None and layers >= 0):
        return ""
    status, said = ask("GET", "/api/ps", None)
    running = (
        [
            one
            for one in said.get("models", ())
            if order.source in (one.get("name"), one.get("model"))
        ]
        if status == 200 and isinstance(said, dict)
        else []
    )
    if not running:
        return "Ollama does not list it as loaded"
    size, on_card = running[0].get("size", 0), running[0].get("size_vram", 0)
    return (
        ""
        if on_card >= size
        else f"only {show_bytes(on_card)} of its {show_bytes(size)} are on the GPU"
    )
