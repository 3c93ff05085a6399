"""Hugging Face diffusers: our own server program (`diffusers_app.py`) serves one image pipeline.

Sources: diffusers, DiffusionPipeline.from_pretrained; OpenAI, images API; Model Boss, DiffusersBackend.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ...errors import NotAModel
from ...facts import Evidence, ModelSpec
from ..processes.processes import python_file
from .recipe import Command, LaunchOrder, Recipe, dtype_option

NEEDED = ("diffusers", "fastapi", "uvicorn")


class Diffusers(Recipe):
    """Starts our own server program."""

    INHERITS_SOCKET = True
    LAYOUT = "balanced"

    def evidence(self, spec: ModelSpec) -> Evidence:
        """The total size of the weight files of the pipeline, which has a directory for each part.

        Raises NotAModel for a path that is no pipeline.
        """
        path = Path(spec.source).expanduser()
        if (path / "model_index.json").is_file():
            size = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
            return Evidence(file_bytes=size, file_format="safetensors", at_load=True)
        if path.exists():
            text = f"{spec.name}: {path} is not a pipeline; it has no model_index.json."
            raise NotAModel(text, name=spec.name, source=spec.source)
        why = f"there is no {path.absolute()}"
        return Evidence(name=spec.source, why_unknown=why, at_load=True)

    def missing(self) -> str:
        absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if not absent:
            return ""
        verb = "is" if len(absent) == 1 else "are"
        return (
            f"{', '.join(absent)} {verb} not installed.\n"
            f"  Install it:  pip install 'gpu-console[diffusion,serve]'"
        )

    def command(self, order: LaunchOrder) -> Command:
        words = ["--model", order.source, "--name", order.spec.name]
        words += ["--socket", str(order.socket_fd)]
        words += ["--device", "cpu" if order.simulated else "cuda"]
        words += ["--dtype", dtype_option(order.spec) or "auto"]
        for option in ("trust_remote_code", "allow_missing"):
            if order.spec.options.get(option):
                words += [f"--{option.replace('_', '-')}"]
        if len(order.shares) > 1 and not order.simulated:
            words += ["--balanced"]
        program = python_file(Path(__file__).with_name("diffusers_app.py"))
        return Command((*program, *words), {"GPU_ENGINE_KEY": order.key})


RECIPE = Diffusers()
