"""The small models of `gpu_runtime.samples`, and helpers that damage or rearrange their files."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gpu_runtime.samples import VOCABULARY, causal_lm, embedder, gguf_lm, reranker, tokenizer

__all__ = ["VOCABULARY", "causal_lm", "embedder", "gguf_lm", "reranker", "tokenizer"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def hub_cache(home: Path, repository: str, directory: Path) -> None:
    """Copies the model to the place where a download of `repository` would put it, with `home` as
    HF_HUB_CACHE.
    """
    import shutil

    folder = home / ("models--" + repository.replace("/", "--"))
    commit = "0" * 40
    shutil.copytree(directory, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)


def truncate(path: Path, by: int = 1) -> None:
    """Cuts the last `by` bytes off a file."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - by)


def pickled(directory: Path) -> Path:
    """A copy of a model directory whose weights are a pickle file."""
    directory.mkdir()
    (directory / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    return directory
