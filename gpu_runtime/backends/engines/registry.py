"""The names of the engines that have a recipe, each with the module that defines its RECIPE.

To add an engine, write a module with its RECIPE (see `recipe.Recipe`) and add one line to
`RECIPES`. Also add the name of the engine to these tables:

- `_SERVERS` in `gpu_runtime/options.py`: `register` accepts the option `start_seconds`;
- `CONCURRENCY` in `gpu_runtime/serving/queue/concurrency.py`, if the engine computes several calls at once;
- `TENSOR_PARALLEL` in `gpu_runtime/facts/labels.py`, if each layer is computed on all cards of the model;
- `LAYERED` in `gpu_runtime/backends/registry.py`, if some layers may stay on the CPU.
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
    """The recipe of the engine `name`. Raises KeyError if no engine has that name."""
    return importlib.import_module(f".{RECIPES[name]}", __package__).RECIPE
