"""Talking to a transformers module: `generate` in a thread, its text told as it is written.

A module that was made in code, without a tokenizer, has no words to be talked to in.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from typing import Any

from ...facts import ModelSpec
from ..queue.thread_stream import Emit, in_thread, pumped
from .base import TextSpeaker, cannot
from .llama_cpp import too_long
from .openai_format import Piece, StopText, stops_of, tokens_wanted

TOKENS = 512  # of an answer, where neither the caller nor the model says
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty")


class ModuleSpeaker(TextSpeaker):
    """`value` is the module, with its `.tokenizer`."""

    kind = "a module that does not generate"

    def __init__(self, value: Any, spec: ModelSpec) -> None:
        super().__init__(value, spec)
        self.tokenizer = getattr(value, "tokenizer", None)
        if self.tokenizer is None:
            raise cannot(spec.name, "it has no tokenizer", "model")

    def template(self) -> str | None:
        template = self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def tokens(self) -> dict[str, str]:
        return {
            name: str(getattr(self.tokenizer, name))
            for name in ("bos_token", "eos_token")
            if getattr(self.tokenizer, name, None)
        }

    def prompt(self, kind: str, body: dict[str, Any], think: bool | None) -> Any:
        if not getattr(self.value, "can_generate", lambda: False)():
            raise cannot(
                self.spec.name, f"it is of type {self.spec.model_type} and writes no text", "model"
            )
        text = super().prompt(kind, body, think)
        # A template writes the beginning of the sequence itself.
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=kind == "completions")

    def pieces(self, kind: str, body: dict[str, Any], think: bool | None) -> AsyncGenerator[Piece]:
        def work(emit: Emit, gone: threading.Event) -> None:
            prompt = self.prompt(kind, body, think)
            size, most = int(prompt["input_ids"].shape[1]), tokens_wanted(body)
            context = int(getattr(self.value.config, "max_position_embeddings", 0) or 1 << 30)
            if not size or size + (most or 1) > context:
                raise too_long(self.spec.name, size, most, context)
            self._write(prompt, size, most or min(TOKENS, context - size), body, emit, gone)

        return pumped(work)

    def _write(
        self,
        prompt: Any,
        size: int,
        most: int,
        body: dict[str, Any],
        emit: Emit,
        gone: threading.Event,
    ) -> None:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

        stop = StopText(stops_of(body))
        written = [-size]  # the streamer is given the prompt first

        class Telling(TextStreamer):
            def put(self, value: Any) -> None:
                written[0] += value.numel()
                super().put(value)

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                told = stop.feed(text) + (stop.rest() if stream_end and not stop.hit else "")
                if told:
                    emit(Piece(told))

        class Gone(StoppingCriteria):
            def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
                return torch.full(
                    (ids.shape[0],), gone.is_set() or stop.hit, dtype=torch.bool, device=ids.device
                )

        inputs = {
            name: tensor.to(self.value.device)
            for name, tensor in prompt.items()
            if name != "token_type_ids"
        }
        with _seeded(body.get("seed")):
            made = self.value.generate(
                **inputs,
                **_sampling(body),
                max_new_tokens=most,
                stopping_criteria=StoppingCriteriaList([Gone()]),
                streamer=Telling(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            )
        ends = self.value.generation_config.eos_token_id
        last = int(made[0, -1])
        ended = (
            stop.hit or written[0] < most or last in (ends if isinstance(ends, list) else [ends])
        )
        emit(
            Piece(
                finish="stop" if ended else "length",
                prompt_tokens=size,
                completion_tokens=written[0],
            )
        )

    async def vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        if self.spec.model_type != "embedding":
            return await super().vectors(texts)
        return await in_thread(lambda: self._embed(texts))

    def _embed(self, texts: list[str]) -> tuple[list[list[float]], int]:
        """The mean of the last layer over each text's tokens, at length one, as OpenAI's are."""
        import torch

        rows, count = [], 0
        with torch.inference_mode():
            for text in (
                texts
            ):  # one by one: padding is not every tokenizer's, and changes some models' answers
                limit = getattr(self.value.config, "max_position_embeddings", None)
                inputs = self.tokenizer(
                    text, return_tensors="pt", truncation=limit is not None, max_length=limit
                )
                if not inputs["input_ids"].numel():
                    raise cannot(self.spec.name, "one of the texts has no tokens", "input")
                inputs = {
                    name: tensor.to(self.value.device)
                    for name, tensor in inputs.items()
                    if name in ("input_ids", "attention_mask")
                }
                mean = self.value(**inputs).last_hidden_state[0].float().mean(dim=0)
                rows.append(torch.nn.functional.normalize(mean, dim=0).tolist())
                count += int(inputs["input_ids"].numel())
        return rows, count


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """How the next token is chosen; where nobody says, as the model's own configuration has it."""
    given = {name: body[name] for name in _SAMPLING if body.get(name) is not None}
    if not given and body.get("seed") is None:
        return {}
    if given.get("temperature") == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, **given}


def _seeded(seed: int | None) -> Any:
    """Chance that begins at the seed, and goes on afterwards as if nothing had been. Other threads share it."""
    import contextlib

    import torch

    if seed is None:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def seeded() -> Any:
        cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(cards, device_type="cuda"):
            torch.manual_seed(seed)
            yield

    return seeded()
