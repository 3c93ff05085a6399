"""The engines that have a recipe, and the module of each.

To add an engine, write its recipe module (see `recipe.Recipe`) and add one line to `RECIPES`.
"""

from __future__ import annotations

import importlib

from .recipe import Recipe

RECIPES = {  # name of the backend -> its module in this package
    "llama-server": "llama_server",
    "vllm": "vllm",
    "ollama": "ollama",
    "diffusers": "diffusers",
}


def recipe(name: str) -> Recipe:
    """The recipe module of the engine `name`. Raises KeyError for an unknown one."""
    return importlib.import_module(f".{RECIPES[name]}", __package__)  # type: ignore[return-value]
