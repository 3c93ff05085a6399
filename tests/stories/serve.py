"""`gpu serve` in a process of its own, with small models of llama.cpp, and OpenAI's client."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.clock import scaled

openai = pytest.importorskip("openai")

from gpu_runtime import samples  # noqa: E402

from ..faces.served import Answer, Served, free_port, serving  # noqa: E402

TOKEN = "o" * 43
HELLO = [{"role": "user", "content": "Hello"}]
FAR_FUTURE = scaled(300.0)  # seconds after which every call must have ended


def gguf_models(directory: Path, *names: str) -> dict[str, dict[str, Any]]:
    """The catalogue's entries of models with different weights, whose files are written."""
    return {
        name: {"source": str(samples.gguf_lm(directory / f"{name}.gguf", seed=seed)), "type": "llm"}
        for seed, name in enumerate(names)
    }


@contextmanager
def gpu_serve(
    directory: Path, models: Mapping[str, Mapping[str, Any]], **environment: str
) -> Iterator[Served]:
    """Runs `gpu serve` with this catalogue inside the `with` block."""
    (directory / "models.json").write_text(json.dumps({"models": models}))
    given = {
        "GPU_CONSOLE_TOKEN": TOKEN,
        "GPU_CATALOG": str(directory / "models.json"),
        "GPU_MEMORY_MAX_PERCENT": "1.0",
        "EVICTION_GRACE_SECONDS": "0",
        **environment,
    }
    port = free_port()
    words = [sys.executable, "-m", "gpu_runtime.cli", "serve", "--port", str(port)]
    with serving(words, directory, given, port=port) as server:
        yield server


def client(server: Served, token: str = TOKEN) -> openai.OpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=FAR_FUTURE)


def send(
    server: Served, path: str, method: str = "GET", body: object = None, **more: str
) -> Answer:
    """The answer to a request of an operator, with `body` as JSON and further headers."""
    text = None if body is None else json.dumps(body)
    return server.get(path, method=method, body=text, Authorization=f"Bearer {TOKEN}", **more)


def told(server: Served, path: str, method: str = "GET") -> Any:
    """The content of the answer, which must be a success."""
    answer = send(server, path, method)
    assert answer.status == 200, answer
    return json.loads(answer.body)
