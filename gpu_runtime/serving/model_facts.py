"""What callers may know of a model before it is loaded: its context, its sizes, and what it can do. Pure."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ..errors import BadSetting
from ..facts import Evidence, ModelSpec
from .engines import chat_template


class ModelFacts:
    """The facts of one model, from its specification and from what its source shows."""

    def __init__(self, spec: ModelSpec, evidence: Evidence, template: str = "") -> None:
        """The facts of the model of `spec`. Its source shows the `evidence` and the chat `template`."""
        self.spec, self.evidence = spec, evidence
        try:
            self.template = chat_template.override(spec.options) or template
        except BadSetting:  # a load reports it
            self.template = template

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config under Hugging Face's names. The fields of its text model are among them."""
        config = self.evidence.config
        inner = config.get("text_config")
        return {**inner, **config} if isinstance(inner, dict) else config

    @property
    def context_length(self) -> int | None:
        """The most tokens of a prompt and its answer together; None if it is not known."""
        options = self.spec.options.get("context_length")
        found = options or self.config.get("context_at_load")
        found = found or self.config.get("max_position_embeddings")
        return found if isinstance(found, int) else None

    @property
    def file_bytes(self) -> int:
        """The bytes of the weights as far as the source shows them; else the declared size; 0: unknown."""
        evidence = self.evidence
        return evidence.file_bytes or evidence.weight_bytes or self.spec.size or 0

    @property
    def capabilities(self) -> list[str]:
        """What the model can do, in Ollama's words."""
        kind = self.spec.model_type
        if kind in ("embedding", "reranker"):
            return ["embedding"] if kind == "embedding" else []
        if kind == "diffusion":
            return ["image"]
        found = ["completion"]
        if "tools" in self.template:
            found.append("tools")
        if kind == "vision":
            found.append("vision")
        if any(
            word in self.template
            for word in ("enable_thinking", "<think>", "reasoning_effort", "[THINK]")
        ):
            found.append("thinking")
        return found
