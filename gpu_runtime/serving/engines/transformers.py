"""The adapter of transformers modules. It runs `generate` in a thread, and streams the text as it is written.

A module without a tokenizer, such as one that was made in code, cannot be called with text. Images are in the request
itself, as `data:` URLs. This server opens no other URL: a caller could otherwise make it read from places that only
this machine can reach.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import inspect
import io
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...facts import ModelSpec
from ...stop_text import StopText
from ..requests import LONGEST_TOKEN, SAMPLING, Json, Refused, bad, sampling, tokens_if_too_many
from ..thread_stream import Emit, in_thread_until, stream_from_thread
from .base import (
    ForcedTokens,
    TextAdapter,
    cannot,
    grammar_of,
    remember,
    schema_of,
    text_too_long,
    too_long,
)
from .openai_format import (
    Scored,
    TextPiece,
    Token,
    Tools,
    Unsent,
    count_of,
    max_tokens_of,
    stops_of,
    tools_of,
)

if TYPE_CHECKING:
    from ...backends.pytorch.sentence_modules import Recipe

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


# -- the probabilities of the tokens that a module writes

_ONE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte as SentencePiece writes it
_SPACE = "▁"  # a space as SentencePiece writes it
LOGITS_AT_ONCE = 1 << 24  # of a prompt; as float32, 64 MiB


class ScoredTokens:
    """Reads a module's logits while it writes an answer, and makes a `Token` of each written token."""

    def __init__(self, tokenizer: Any, count: int) -> None:
        """Stores with each written token the `count` most probable tokens at its position, read by `tokenizer`."""
        self.unsent = Unsent()
        self._count = count
        self._vocabulary = Vocabulary(tokenizer)
        self._logits: Any = None  # of the newest token, a float tensor of the shape (vocabulary,)

    @contextlib.contextmanager
    def reading(self, module: Any) -> Iterator[None]:
        """Reads the logits of `module` in this block; those of other threads that run it are left out."""
        thread = threading.get_ident()

        def read(_: Any, __: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self._logits = output.logits[0, -1]

        hook = module.register_forward_hook(read)
        try:
            yield
        finally:
            hook.remove()

    def add(self, number: int) -> None:
        """Adds the token with this `number`, chosen from the newest logits, to the unsent tokens.

        A special token, such as the one that ends an answer, is left out. So is a number without a token.
        """
        data = self._vocabulary.data(number)
        if not data or number in self._vocabulary.special:
            return
        import torch

        logprobs = torch.log_softmax(self._logits.detach().float(), dim=-1)
        self.unsent.add(Token(data, float(logprobs[number]), self._top(logprobs)))

    def of_prompt(self, module: Any, tokens: list[int]) -> tuple[Token, ...]:
        """The prompt's `tokens` with the probabilities that `module` gives them. The first one has none.

        A long prompt is computed in parts, so that only the logits of one part are held.
        """
        import torch

        name = self._vocabulary.data
        # transformers gave this parameter a new name in 5.24.
        known = inspect.signature(module.forward).parameters
        cache_field = "cache" if "cache" in known else "past_key_values"
        found = [Token(name(tokens[0]), None)]
        ids, cache, at = torch.tensor([tokens], device=module.device), None, 0
        size = max(1, LOGITS_AT_ONCE // module.config.get_text_config().vocab_size)
        with torch.inference_mode():
            while at < len(tokens) - 1:
                part = ids[:, at : at + size]
                output = module(input_ids=part, use_cache=True, **{cache_field: cache})
                cache = getattr(output, cache_field)
                rows = torch.log_softmax(output.logits[0].float(), dim=-1)
                for row, token in zip(rows, tokens[at + 1 :], strict=False):
                    found.append(Token(name(token), float(row[token]), self._top(row)))
                at += part.shape[1]
        return tuple(found)

    def _top(self, logprobs: Any) -> tuple[Scored, ...]:
        """The most probable tokens. A model may have more logits than its tokenizer has tokens: these are left out."""
        found: list[Scored] = []
        wanted = self._count
        while len(found) < self._count:
            wanted = min(wanted, len(logprobs))
            values, numbers = (tensor.tolist() for tensor in logprobs.topk(wanted))
            named = zip(map(self._vocabulary.data, numbers), values, strict=True)
            found = [(data, value) for data, value in named if data]
            if wanted == len(logprobs):
                break
            wanted *= 2
        return tuple(found[: self._count])


class Vocabulary:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids)  # tokens that are no part of the text
        self._added = {number: text for text, number in tokenizer.get_added_vocab().items()}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        # Tokenizers of this kind write each byte as one character.
        is_by_byte = "ByteLevel" in str(decoder)
        bytes_of = bytes_to_unicode() if is_by_byte else {}
        self._bytes = {text: byte for byte, text in bytes_of.items()}

    def data(self, number: int) -> bytes:
        """The bytes of the token with this `number`; empty for a number without a token."""
        if number in self._added:  # an added token is plain text, also where others are bytes
            return self._added[number].encode()
        token = self._tokenizer.convert_ids_to_tokens(number)
        if token is None:
            return b""
        if self._bytes and all(letter in self._bytes for letter in token):
            return bytes(self._bytes[letter] for letter in token)
        match = _ONE_BYTE.fullmatch(token)
        if match:
            return bytes.fromhex(match[1])
        return token.replace(_SPACE, " ").encode()


# -- embeddings and scores of many texts, in batches
#
# Texts of similar length are computed together, since shorter texts are padded to the longest one of their batch. The
# padding is masked, so a text has the same vector alone and among other texts.

TEXTS_AT_ONCE = 32
TOKENS_AT_ONCE = 16_384  # the padding counts too


def recipe_of(module: Any, tokenizer: Any, model: str) -> Recipe | None:
    """How `module` makes one vector of the vectors of a text's tokens. None is the mean.

    If the load of the `model` did not attach it, it is read from the files beside its `tokenizer`. Raises Refused.
    """
    found = getattr(module, "sentence_recipe", None)
    if found is not None:
        return found
    from ...backends.pytorch.sentence_modules import recipe_of as read

    directory = folder_of(tokenizer)
    try:
        recipe = read(directory, tokenizer)
    except ValueError as error:
        raise cannot(model, str(error), "model") from None
    if recipe is not None and next(recipe.parameters(), None) is not None:
        why = (
            f"sentence-transformers has saved weights in {directory} that were not loaded with it.\n"
            f"  Load them too:  rt.forget({model!r}), then  "
            f"rt.register({model!r}, {str(directory)!r}, model_type='embedding')"
        )
        raise cannot(model, why, "model")
    return recipe


def folder_of(tokenizer: Any) -> Path:
    """The folder from which the `tokenizer` was loaded."""
    return Path(str(getattr(tokenizer, "name_or_path", "")))


def most_tokens_of_pair(module: Any, tokenizer: Any, model: str) -> int | None:
    """The most tokens that the reranker `module` reads of a query and a document; None: no limit. Raises Refused."""
    from ...backends.pytorch.sentence_modules import most_tokens_of_pair as read

    try:
        limits = [most_tokens(module), read(folder_of(tokenizer), tokenizer)]
    except (OSError, ValueError) as error:
        why = f"its files for sentence-transformers cannot be used: {error}"
        raise cannot(model, why, "model") from None
    return min((limit for limit in limits if limit is not None), default=None)


def most_tokens(module: Any) -> int | None:
    """The largest number of tokens that `module` reads of one text; None if its config names no limit.

    RoBERTa, XLM-R and MPNet number positions from the row after the padding token's row. So of their 514 positions
    only 512 are for a text. A longer text is an index error, and on a real card it ends the CUDA context.
    """
    positions = getattr(module.config, "max_position_embeddings", None)
    if positions is None:
        return None
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == "position_embeddings":
            padding = getattr(part, "padding_idx", None)
            return positions if padding is None else positions - padding - 1
    return positions


def batches(lengths: list[int]) -> Iterator[list[int]]:
    """Yields the indices of texts that are computed together; `lengths` are the texts' numbers of tokens.

    >>> list(batches([3, 9000, 2, 9000]))
    [[2, 0], [1], [3]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        size = lengths[index]  # the lengths ascend, so this text is the longest of its batch
        is_longer = batch and size > 2 * lengths[batch[0]] and size > TEXTS_AT_ONCE
        is_full = len(batch) == TEXTS_AT_ONCE or (len(batch) + 1) * size > TOKENS_AT_ONCE
        if batch and (is_full or is_longer):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def embed_in_batches(
    module: Any,
    texts: list[list[int]],
    recipe: Recipe | None,
    cancelled: Callable[[], bool],
    has_prompt: bool = False,
) -> list[list[float]]:
    """An embedding of length one by `module` of each of the `texts`, which are lists of tokens.

    `has_prompt` is whether the texts begin with the prompt of the `recipe`. Once `cancelled()` is true, the texts that
    are left get empty vectors.
    """
    import torch

    rows: list[list[float]] = [[] for _ in texts]
    with torch.inference_mode():
        for batch in batches([len(text) for text in texts]):
            if cancelled():
                break
            ids, mask = (part.to(module.device) for part in padded([texts[at] for at in batch]))
            states = module(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            if recipe is None:
                weights = mask.unsqueeze(-1).to(states.dtype)
                vectors = (states * weights).sum(dim=1) / weights.sum(dim=1)
            else:
                vectors = recipe(states, mask, has_prompt)
            found = torch.nn.functional.normalize(vectors, dim=1).tolist()
            for index, vector in zip(batch, found, strict=True):
                rows[index] = vector
    return rows


def rank_in_batches(
    module: Any, pairs: list[Any], model: str, cancelled: Callable[[], bool]
) -> list[float]:
    """A score from 0 to 1, by the `module` of `model`, for each of the `pairs` of a query and a document, tokenised.

    Once `cancelled()` is true, the pairs that are left get the score 0. Raises Refused if the module gives more than
    two figures for a pair.
    """
    import torch

    scores = [0.0] * len(pairs)
    with torch.inference_mode():
        for batch in batches([len(pair["input_ids"]) for pair in pairs]):
            if cancelled():
                break
            ids, mask = padded([pairs[index]["input_ids"] for index in batch])
            inputs = {"input_ids": ids, "attention_mask": mask}
            if "token_type_ids" in pairs[0]:
                inputs["token_type_ids"], _ = padded(
                    [pairs[index]["token_type_ids"] for index in batch]
                )
            on_device = {name: tensor.to(module.device) for name, tensor in inputs.items()}
            logits = module(**on_device).logits.float()
            if logits.shape[1] > 2:
                why = f"it sorts texts into {logits.shape[1]} classes, and gives no score"
                raise cannot(model, why, "model")
            found = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)
            for index, score in zip(batch, found.sigmoid().tolist(), strict=True):
                scores[index] = score
    return scores


def padded(texts: list[list[int]]) -> tuple[Any, Any]:
    """The tokens of `texts` as one tensor, filled up with zeros, and the mask of the real tokens."""
    import torch

    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    lengths = torch.tensor([len(text) for text in texts])
    return ids, (torch.arange(longest) < lengths[:, None]).long()
