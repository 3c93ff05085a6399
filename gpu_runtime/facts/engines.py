"""The registry of engines that are HTTP servers, with the facts that other folders need.

To add an engine, write its recipe (see `backends/engines/recipe.py`) and one line here.
"""

from __future__ import annotations

from typing import NamedTuple


class Engine(NamedTuple):
    """The facts about an engine that no other module knows; its recipe starts its server."""

    recipe: str  # the recipe's class in `backends/engines/recipes.py`
    # The fields of a model that this engine reads besides those of every engine; "llama.cpp": all of llama.cpp.
    takes: tuple[str, ...] = ()
    calls_at_once: int = 1  # unless the model's `sequences` is set
    # Whether each layer is computed on all cards of the model. Other engines put each layer or component on one card,
    # even if the shares of the cards are equal.
    tensor_parallel: bool = False
    layered: bool = False  # whether INFERENCE_GPU_LAYERS may leave some layers on the CPU


ENGINES = {  # name of the backend -> its facts
    "llama-server": Engine("LlamaServer", ("llama.cpp",), layered=True),
    "vllm": Engine("Vllm", ("dtype", "trust_remote_code", "sleep"), 256, tensor_parallel=True),
    "sglang": Engine("Sglang", ("dtype", "trust_remote_code", "sleep"), 256, tensor_parallel=True),
    "ollama": Engine("Ollama", ("gpu_layers",)),
    "diffusers": Engine("Diffusers", ("dtype", "trust_remote_code", "allow_missing")),
    "program": Engine("Program", ("sleep",)),
}
