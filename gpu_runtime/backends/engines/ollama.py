"""Ollama: the server `ollama serve`. Each model has its own server, which keeps the model loaded.

Ollama decides how much of a model is put on the card. So the placement is read from `/api/ps`, and
the server is restarted if a part of the model is not on the card. This module downloads nothing, so
the user must pull models first. Ollama has no key, so every user of this machine can send it
requests.

Sources: Ollama, docs/api, envconfig/config.go and openai/openai.go; Helix, Multi-GPU Scheduling, 5.3.
"""

from __future__ import annotations

import shutil
from typing import Any

from ...errors import BadSetting, LoadFailed
from ...units import show_bytes
from ..llama_cpp.options import cache_type
from .recipe import Command, LaunchOrder, Recipe, RequestFields, SendRequest

FOR_EVER = -1
# For other types, Ollama silently uses f16. Source: fs/ggml/ggml.go
_CACHE_TYPES = ("f16", "q8_0", "q4_0")
_TEXT_FIELDS = """model stream stream_options max_tokens seed stop temperature top_p frequency_penalty
    presence_penalty logprobs"""
_FIELDS = {
    "chat": frozenset(
        f"{_TEXT_FIELDS} messages response_format tools reasoning reasoning_effort top_logprobs".split()
    ),
    "completions": frozenset(f"{_TEXT_FIELDS} prompt suffix".split()),
    "embeddings": frozenset("model input dimensions encoding_format".split()),
}


class Ollama(Recipe):
    """Starts `ollama serve`."""

    LAYOUT = "proportional"
    KEYED = False

    def health_path(self) -> str:
        """A path at which the server answers once it runs. `prepare` then loads the model."""
        return "/api/version"

    def missing(self) -> str:
        if shutil.which("ollama"):
            return ""
        return "there is no command ollama here.\n  Install it from ollama.com"

    def model(self, order: LaunchOrder) -> str:
        return order.source

    def command(self, order: LaunchOrder) -> Command:
        """The command, with options as environment variables, except `gpu_layers` (see `prepare`).

        Raises BadSetting for a cache that Ollama has not.
        """
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
            dtype = cache_type(order.spec)
            if dtype not in _CACHE_TYPES:
                expected = f"{', '.join(_CACHE_TYPES)} with Ollama"
                raise BadSetting("cache_dtype", options["cache_dtype"], expected)
            environment["OLLAMA_KV_CACHE_TYPE"] = dtype
            environment["OLLAMA_FLASH_ATTENTION"] = "1"
        return Command((shutil.which("ollama") or "ollama", "serve"), environment)

    def prepare(self, order: LaunchOrder, send: SendRequest) -> None:
        """Loads the model of `order` by a request without a prompt. Raises LoadFailed."""
        body: dict[str, Any] = {"model": order.source, "keep_alive": FOR_EVER, "stream": False}
        layers = order.spec.options.get("gpu_layers")
        if layers is not None and layers >= 0:
            body["options"] = {"num_gpu": layers}
        status, answer = send("POST", "/api/generate", body)
        if status == 200:
            return
        why = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = f"Ollama answered {status}: {why}."
        if status == 404:
            text = f"Ollama has no model {order.source}.\n  Pull it:  ollama pull {order.source}"
        raise LoadFailed(
            f"{order.spec.name} cannot be loaded: {text}",
            name=order.spec.name,
            source=order.source,
            mistake=status == 404,
        )

    def request_fields(self, order: LaunchOrder, send: SendRequest) -> RequestFields:
        """The fields that the code of Ollama's OpenAI API reads. It ignores any other field."""
        return _FIELDS

    def misplaced(self, order: LaunchOrder, send: SendRequest) -> str:
        """How much of the model is on the card, from the server; empty if all of it is there.

        Not checked on simulated cards, and for a model with a set number of `gpu_layers`.
        """
        layers = order.spec.options.get("gpu_layers")
        if order.simulated or (layers is not None and layers >= 0):
            return ""
        running = _running_model(order.source, send)
        if running is None:
            return "Ollama does not list it as loaded"
        total_bytes, card_bytes = running.get("size", 0), running.get("size_vram", 0)
        if card_bytes >= total_bytes:
            return ""
        return f"only {show_bytes(card_bytes)} of its {show_bytes(total_bytes)} are on the GPU"


def _running_model(name: str, send: SendRequest) -> dict[str, Any] | None:
    """The entry of the loaded model `name` in `/api/ps`. Ollama adds `:latest` if there is no tag."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    status, answer = send("GET", "/api/ps", None)
    if status != 200 or not isinstance(answer, dict):
        return None
    for entry in answer.get("models", ()):
        if tagged in (entry.get("name"), entry.get("model")):
            return entry
    return None


RECIPE = Ollama()
