"""Pictures by Hugging Face diffusers: a worker of our own (`diffusers_app.py`), which serves one pipeline.

Sources: diffusers, DiffusionPipeline.from_pretrained; OpenAI, images API; Model Boss, DiffusersBackend.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ...errors import NotAModel
from ...facts import Evidence, ModelSpec
from ..processes.processes import python_file
from .recipe import Command, Order, as_it_was_told, nothing_to_do, path_or_name, switched_by_nobody

HEALTH = "/health"
BASE = "/v1"
LAYOUT = "balanced"
KEYED = True
NEEDED = ("diffusers", "fastapi", "uvicorn")
source, template, prepare, misplaced = (
    path_or_name,
    switched_by_nobody,
    nothing_to_do,
    as_it_was_told,
)


def evidence(spec: ModelSpec) -> Evidence:
    """The files of a pipeline's parts, one directory each; what has none here is told by its name."""
    path = Path(spec.source).expanduser()
    if not (path / "model_index.json").is_file():
        if path.exists():
            raise NotAModel(
                f"{spec.name}: {path} is no pipeline; it has no model_index.json.",
                name=spec.name,
                source=spec.source,
            )
        return Evidence(
            name=spec.source, why_unknown=f"there is no {path.absolute()}", at_load=True
        )
    size = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
    return Evidence(file_bytes=size, file_format="safetensors", at_load=True)


def missing() -> str:
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return (
        f"{', '.join(absent)} is not installed.\n  Install it:  pip install 'gpu-console[diffusion,serve]'"
        if absent
        else ""
    )


def model(order: Order) -> str:
    return order.spec.name


def command(order: Order) -> Command:
    options = order.spec.options
    words = [
        "--model",
        order.source,
        "--name",
        order.spec.name,
        "--port",
        str(order.port),
        "--device",
        "cpu" if order.simulated else "cuda",
        "--dtype",
        str(options.get("dtype", "auto")),
    ]
    if len(order.shares) > 1 and not order.simulated:
        words += ["--balanced"]
    return Command(
        (*python_file(Path(__file__).with_name("diffusers_app.py")), *words),
        {"GPU_ENGINE_KEY": order.key},
    )
