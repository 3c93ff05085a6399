"""Which engine is started by which recipe."""

from __future__ import annotations

import importlib

from .recipe import Recipe

RECIPES = {  # name of the backend -> its module here
    "llama-server": "llama_server",
    "vllm": "vllm",
    "ollama": "ollama",
    "diffusers": "diffusers",
}


def recipe(name: str) -> Recipe:
    """The recipe of that engine."""
    return importlib.import_module(f".{RECIPES[name]}", __package__)  # type: ignore[return-value]
