"""The adapter of transformers modules. It runs `generate` in a thread, and streams the text as it is written.

A module without a tokenizer, such as one that was made in code, cannot be called with text. Images are in the request
itself, as `data:` URLs. This server opens no other URL: a caller could otherwise make it read from places that only
this machine can reach.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from ...facts import ModelSpec
from ...stop_text import StopText
from ..fields import SAMPLING, sampling
from ..prompt_size import LONGEST_TOKEN, tokens_if_too_many
from ..queue.thread_stream import Emit, in_thread_until, stream_from_thread
from ..requests import Json, Refused, bad
from .base import TextAdapter, cannot, remember, text_too_long, too_long
from .embedding import (
    embed_in_batches,
    most_tokens,
    most_tokens_of_pair,
    rank_in_batches,
    recipe_of,
)
from .json_answers import ForcedTokens, grammar_of, schema_of
from .logprobs import count_of
from .openai_format import TextPiece, max_tokens_of, stops_of
from .scored_tokens import ScoredTokens
from .tool_calls import Tools, tools_of

DEFAULT_TOKENS = 512  # of an answer, if neither the caller nor the model sets a limit
_PENALTIES = ("repeat_penalty", "repetition_penalty")
_SAMPLING_FIELDS = SAMPLING | dict.fromkeys(_PENALTIES, "repetition_penalty")
_NO_LIMIT = (("typical_p", 1.0), ("typical_p", 0.0))  # mean no limit, but the library refuses them


class TransformersAdapter(TextAdapter):
    """Calls the module `value`, whose attribute `.tokenizer` is its tokenizer."""

    kind = "a module that does not generate"
    can_force_calls = True

    def __init__(self, value: Any, spec: ModelSpec) -> None:
        """The adapter of the module `value`. Raises Refused if the module has no tokenizer."""
        super().__init__(value, spec)
        self.tokenizer = getattr(value, "tokenizer", None)
        self.processor = getattr(value, "processor", None)
        self.takes_images = getattr(self.processor, "image_processor", None) is not None
        if self.tokenizer is None:
            raise cannot(spec.name, "it has no tokenizer", "model")
        remember(spec, self.tokenizer, self._context())

    def _context(self) -> int:
        """The most tokens that the model can read; 2**30 if its config names no limit."""
        config = getattr(self.value, "config", None)
        if hasattr(config, "get_text_config"):  # a model with images has a part for text
            config = config.get_text_config()
        return int(getattr(config, "max_position_embeddings", 0) or 1 << 30)

    def template(self) -> str | None:
        template = getattr(self.processor, "chat_template", None) or self.tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def tokens(self) -> dict[str, str]:
        found = {name: getattr(self.tokenizer, name, None) for name in ("bos_token", "eos_token")}
        return {name: str(token) for name, token in found.items() if token}

    def prompt(self, kind: str, body: Json, think: bool | None) -> Any:
        return self._tokenized(kind, self._text(kind, body, think))

    def _text(self, kind: str, body: Json, think: bool | None) -> Any:
        if not getattr(self.value, "can_generate", lambda: False)():
            why = f"it is of type {self.spec.model_type} and writes no text"
            raise cannot(self.spec.name, why, "model")
        return super().prompt(kind, body, think)

    def _count(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _echoed(self, prompt: Any, text: str | list[int], count: int | None) -> TextPiece:
        """The prompt as the first piece of the answer, with probabilities unless `count` is None."""
        tokens = prompt["input_ids"][0].tolist()
        plain = text if isinstance(text, str) else self.tokenizer.decode(tokens)
        scored = ScoredTokens(self.tokenizer, count or 0)
        found = () if count is None else scored.of_prompt(self.value, tokens)
        return TextPiece(plain, tokens=found)

    def _tokenized(self, kind: str, text: str | list[int]) -> Any:
        # For a chat the tokenizer adds no special tokens, because the chat template has written them.
        if not isinstance(text, str):
            import torch

            self.require_tokens(text, self.value.config.get_text_config().vocab_size, "prompt")
            ids = torch.tensor([text])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=kind == "completions")

    def _with_images(self, text: str, images: list[Any]) -> Any:
        """The tokens of a chat's `text`, and the pixels of its `images`. Raises Refused."""
        try:
            return self.processor(
                text=[text], images=images, add_special_tokens=False, return_tensors="pt"
            )
        except ValueError as error:  # for example, the chat template has dropped an image
            why = f"its processor does not take this conversation: {error}"
            raise cannot(self.spec.name, why, "messages") from None

    def pieces(self, kind: str, body: Json, think: bool | None) -> AsyncGenerator[TextPiece]:
        tools = tools_of(body) if kind == "chat" else Tools()
        schema = schema_of(body, tools) if kind == "chat" else None

        def work(emit: Emit, cancelled: threading.Event) -> None:
            limit = max_tokens_of(body)
            self.require_known(body, len(self.tokenizer))
            context = self._context()
            text = self._text(kind, body, think)
            if isinstance(text, str):
                count = tokens_if_too_many(text, context, self._count, cancelled.is_set)
                if count or cancelled.is_set():
                    raise too_long(self.spec.name, kind, count, context)
            images = images_of(body["messages"]) if kind == "chat" and self.takes_images else []
            prompt = self._with_images(text, images) if images else self._tokenized(kind, text)
            prompt_tokens = int(prompt["input_ids"].shape[1])
            room = context - prompt_tokens
            if not prompt_tokens or room < (limit != 0):
                raise too_long(self.spec.name, kind, prompt_tokens, context)
            forced = None
            if schema is not None:
                grammar = grammar_of(schema, self.spec.name, is_hint=bool(tools.forced))
                forced = ForcedTokens(grammar, self.tokenizer, self._ends(), self.spec.name)
            if limit is not None and limit > room:
                emit(TextPiece(room=room))
            limit = min(DEFAULT_TOKENS if limit is None else limit, room)
            if body.get("echo"):
                emit(self._echoed(prompt, text, count_of(body)))
            if not limit:
                emit(TextPiece(finish="length", prompt_tokens=prompt_tokens))
                return
            self._write(prompt, limit, body, forced, emit, cancelled)

        return stream_from_thread(work)

    def _write(
        self,
        prompt: Any,
        limit: int,
        body: Json,
        forced: ForcedTokens | None,
        emit: Emit,
        cancelled: threading.Event,
    ) -> None:
        """Emits the pieces of an answer of at most `limit` tokens, all of which `forced`, if given, allows."""
        from transformers import LogitsProcessorList, StoppingCriteriaList

        stop = StopText(stops_of(body))
        prompt_tokens = int(prompt["input_ids"].shape[1])
        count = count_of(body)
        scored = None if count is None else ScoredTokens(self.tokenizer, count)
        streamer = _streamer(self.tokenizer, prompt_tokens, stop, scored, emit)
        stopping = _stopping(stop, cancelled, forced)
        processors = [] if forced is None else [_forcing(forced)]
        presence = body.get("presence_penalty") or 0.0
        frequency = body.get("frequency_penalty") or 0.0
        if presence or frequency:
            processors.append(_penalties(prompt_tokens, presence, frequency))
        # A model's own settings may suppress all the tokens that the schema allows.
        more: dict[str, Any] = {"suppress_tokens": None} if forced else {}
        reading = scored.reading(self.value) if scored else contextlib.nullcontext()
        with _seeded(body.get("seed")), reading:
            output = self.value.generate(
                **self._on_device(prompt),
                **_sampling(body),
                **more,
                max_new_tokens=limit,
                stopping_criteria=StoppingCriteriaList([stopping]),
                logits_processor=LogitsProcessorList(processors),
                streamer=streamer,
            )
        ended = stop.hit or stopping.complete or streamer.written < limit
        ended = ended or int(output[0, -1]) in self._ends()
        emit(
            TextPiece(
                finish="stop" if ended else "length",
                prompt_tokens=prompt_tokens,
                completion_tokens=streamer.written,
                tokens=scored.unsent.take_rest() if scored and not stop.hit else (),
            )
        )

    def _ends(self) -> list[int]:
        ends = self.value.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [] if ends is None else [ends]

    async def vectors(
        self, texts: list[str | list[int]], truncate: bool
    ) -> tuple[list[list[float]], int]:
        if self.spec.model_type != "embedding":
            return await super().vectors(texts, truncate)
        return await in_thread_until(lambda cancelled: self._embed(texts, truncate, cancelled))

    def _embed(
        self, texts: list[str | list[int]], truncate: bool, cancelled: threading.Event
    ) -> tuple[list[list[float]], int]:
        """An embedding of each of the `texts`, and the tokens read. Ends early once `cancelled` is set."""
        self._require_transformers()
        tokens: list[list[int]] = []
        recipe = recipe_of(self.value, self.tokenizer, self.spec.name)
        limits = [most_tokens(self.value), recipe.limit if recipe else None]
        limit = min((limit for limit in limits if limit is not None), default=None)
        for text in texts:
            if cancelled.is_set():
                return [], 0
            tokens.append(self._tokens_of(_prepared(text, recipe), limit, truncate))
        has_prompt = isinstance(texts[0], str)
        rows = embed_in_batches(self.value, tokens, recipe, cancelled.is_set, has_prompt)
        return rows, sum(map(len, tokens))

    def _require_transformers(self) -> None:
        """Raises Refused for an object of sentence-transformers. Its folder is served, and not the object."""
        kind = type(self.value)
        if kind.__module__.startswith("sentence_transformers."):
            why = (
                f"it is a {kind.__name__}, which is served from its folder only.\n"
                f"  Save it and register that:  model.save(DIRECTORY), then  "
                f"rt.register({self.spec.name!r}, DIRECTORY, model_type={self.spec.model_type!r})"
            )
            raise cannot(self.spec.name, why, "model")

    async def scores(self, query: str, documents: list[str]) -> tuple[list[float], int]:
        if self.spec.model_type != "reranker":
            return await super().scores(query, documents)

        def work(cancelled: threading.Event) -> tuple[list[float], int]:
            self._require_transformers()
            limit = most_tokens_of_pair(self.value, self.tokenizer, self.spec.name)
            pairs = []
            for text in documents:
                if cancelled.is_set():
                    return [], 0
                pairs.append(
                    self.tokenizer(query, text, truncation=limit is not None, max_length=limit)
                )
            scores = rank_in_batches(self.value, pairs, self.spec.name, cancelled.is_set)
            return scores, sum(len(pair["input_ids"]) for pair in pairs)

        return await in_thread_until(work)

    async def tokenize(self, text: str, special: bool) -> list[int]:
        return await in_thread_until(
            lambda cancelled: list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        )

    async def detokenize(self, tokens: list[int]) -> str:
        self.require_tokens(tokens, len(self.tokenizer), "tokens")
        return await in_thread_until(lambda cancelled: self.tokenizer.decode(tokens))

    def _tokens_of(self, text: str | list[int], limit: int | None, truncate: bool) -> list[int]:
        """The tokens of a `text`; with `truncate`, the first `limit` of them.

        Raises Refused if a token is not in the vocabulary, if the text has no tokens, or if it has too many.
        """
        if isinstance(text, str):
            # The tokenizer would tokenise all of a long text, which takes long, and then drop what is too much.
            kept = text if limit is None else text[: limit * LONGEST_TOKEN]
            cuts = truncate and limit is not None
            found = self.tokenizer(kept, truncation=cuts, max_length=limit if cuts else None)
            tokens = list(found["input_ids"])
        else:
            self.require_tokens(text, self.value.config.vocab_size, "input")
            tokens = text[:limit] if truncate else text
        if not tokens:
            raise cannot(self.spec.name, "one of the texts has no tokens", "input")
        if limit is not None and len(tokens) > limit:
            raise text_too_long(self.spec.name, len(tokens), limit)
        return tokens

    def _on_device(self, inputs: Any) -> dict[str, Any]:
        """The `inputs` on the module's device. Pixels get the module's dtype."""
        found = {}
        for name, tensor in inputs.items():
            dtype = self.value.dtype if tensor.is_floating_point() else tensor.dtype
            found[name] = tensor.to(self.value.device, dtype)
        if "pixel_values" not in found:  # only models with images tell types of tokens apart
            found.pop("token_type_ids", None)
        return found


def _prepared(text: str | list[int], recipe: Any) -> str | list[int]:
    """The `text` as the model of this `recipe` was trained to read it. Tokens stay as they are."""
    if not isinstance(text, str) or recipe is None:
        return text
    text = recipe.prompt + text
    return text.lower() if recipe.lower else text


def _streamer(
    tokenizer: Any, prompt_tokens: int, stop: StopText, scored: ScoredTokens | None, emit: Emit
) -> Any:
    """A streamer that emits text, and `scored` tokens, up to a stop string; `written` counts all tokens."""
    from transformers import TextStreamer

    class CountingStreamer(TextStreamer):
        written = -prompt_tokens  # the first call of `put` by `generate` has the prompt

        def put(self, value: Any) -> None:
            is_prompt = self.written < 0
            self.written += value.numel()
            if scored and not is_prompt:
                scored.add(int(value))
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            safe = stop.feed(text)
            if stream_end and not stop.hit:
                safe += stop.rest()
            if safe:
                emit(TextPiece(safe, tokens=scored.unsent.take(safe) if scored else ()))

    return CountingStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _stopping(stop: StopText, cancelled: threading.Event, forced: ForcedTokens | None) -> Any:
    """Ends `generate` at a stop string, when `cancelled` is set, or once a `forced` answer is `complete`."""
    import torch
    from transformers import StoppingCriteria

    class StopWhenDone(StoppingCriteria):
        complete = False

        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            self.complete = forced is not None and forced.ends_with(int(ids[0, -1]))
            ends = self.complete or stop.hit or cancelled.is_set()
            return torch.full((ids.shape[0],), ends, dtype=torch.bool, device=ids.device)

    return StopWhenDone()


def _forcing(forced: ForcedTokens) -> Any:
    """A processor for `generate`, which excludes all tokens but those that `forced` allows."""
    import torch
    from transformers import LogitsProcessor

    class OnlyAllowed(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            allowed = torch.frombuffer(bytearray(forced.allowed()), dtype=torch.uint8).bool()
            size = min(len(allowed), scores.shape[1])  # a model may have more scores than tokens
            kept = torch.full_like(scores, -torch.inf)
            excluded = ~allowed[:size].to(scores.device)
            kept[:, :size] = scores[:, :size].masked_fill(excluded, -torch.inf)
            return kept

    return OnlyAllowed()


def _penalties(prompt_tokens: int, presence: float, frequency: float) -> Any:
    """A processor for `generate`, which lowers the scores of tokens that the answer already has.

    Each such token loses `presence`, and `frequency` for each time that it was written. The first `prompt_tokens`
    tokens do not count. Source: OpenAI, "Presence and frequency penalties".
    """
    import torch
    from transformers import LogitsProcessor

    class Penalties(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            written = ids[:, prompt_tokens:]
            ones = torch.ones_like(written, dtype=scores.dtype)
            counts = torch.zeros_like(scores).scatter_add_(1, written, ones)
            return scores - frequency * counts - presence * (counts > 0)

    return Penalties()


def _sampling(body: Json) -> dict[str, Any]:
    """The arguments of `generate` that decide how the next token is chosen; without any, the model's own apply."""
    fields = sampling(body, _SAMPLING_FIELDS)
    # The library accepts no int where it expects a float, and no `top_k` below 0.
    fields = {
        name: max(0, value) if name == "top_k" else float(value) for name, value in fields.items()
    }
    fields = {name: value for name, value in fields.items() if (name, value) not in _NO_LIMIT}
    biases = (body.get("logit_bias") or {}).items()
    more = {"sequence_bias": {(int(token),): float(bias) for token, bias in biases}}
    more = more if biases else {}
    if not fields and body.get("seed") is None:
        return more
    if fields.get("temperature") == 0:
        more |= {name: fields[name] for name in fields if name == "repetition_penalty"}
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, **more}
    return {"do_sample": True, **fields, **more}


@contextlib.contextmanager
def _seeded(seed: int | None) -> Any:
    """In this block, torch's random numbers start from `seed`, unless it is None. Its end restores the earlier state.

    All threads share torch's random state. So another thread that draws random numbers meanwhile changes those here.
    """
    import torch

    if seed is None:
        yield
        return
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(cards, device_type="cuda"):
        torch.default_generator.manual_seed(seed)
        for card in cards:  # torch.manual_seed would also seed cards that are not in use yet
            torch.cuda.default_generators[card].manual_seed(seed)
        yield


MOST_IMAGES = 16  # of one request
MOST_PIXELS = 40_000_000  # of one image; 8K has 33 million
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
DETAILS = (None, "auto", "high")  # with `low`, OpenAI's models see a smaller image


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The images of the `messages`, in order, as RGB images of Pillow. Raises Refused (400)."""
    urls = list(_urls(messages))
    if len(urls) > MOST_IMAGES:
        text = f"the request has {len(urls)} images; at most {MOST_IMAGES} are accepted"
        raise Refused(400, "bad_image", text, param="messages")
    return [_image(place, url) for place, url in urls]


def _urls(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields the place of each image in the `messages`, and its URL."""
    for at, message in enumerate(messages):
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") != "image_url":
                continue
            place = f"messages[{at}].content[{number}].image_url"
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else None
            if not isinstance(url, str):
                raise bad(place, image, 'an object such as {"url": "data:image/png;base64,…"}')
            if image.get("detail") not in DETAILS:
                raise bad(f"{place}.detail", image["detail"], "auto or high")
            yield f"{place}.url", url


def _image(place: str, url: str) -> Any:
    from PIL import Image

    head, _, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64"):
        raise bad(place, url, "a data: URL in base64; this server opens no other URLs")
    try:
        # The named media type is not used, because some clients name a wrong one.
        image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=FORMATS)
        width, height = image.size
        if width * height > MOST_PIXELS:
            raise bad(place, url, f"an image of at most {MOST_PIXELS:,} pixels")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError):
        raise bad(place, url, f"an image that can be read: {', '.join(FORMATS)}") from None
