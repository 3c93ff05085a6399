"""The probabilities of the tokens that a transformers module writes."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any

from .logprobs import Scored, Token, Unsent

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
        if not data or self._vocabulary.is_special(number):
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
            values, numbers = (one.tolist() for one in logprobs.topk(wanted))
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
        self._special = frozenset(tokenizer.all_special_ids)
        self._added = {number: text for text, number in tokenizer.get_added_vocab().items()}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        # Tokenizers of this kind write each byte as one character.
        is_by_byte = "ByteLevel" in str(decoder)
        bytes_of = bytes_to_unicode() if is_by_byte else {}
        self._bytes = {text: byte for byte, text in bytes_of.items()}

    def is_special(self, number: int) -> bool:
        """Whether the token with this `number` is a special token, which is no part of the text."""
        return number in self._special

    def data(self, number: int) -> bytes:
        """The bytes of the token with this `number`; empty for a number without a token."""
        if number in self._added:  # an added token is plain text, also where others are bytes
            return self._added[number].encode()
        token = self._tokenizer.convert_ids_to_tokens(number)
        if token is None:
            return b""
        if self._bytes and all(letter in self._bytes for letter in token):
            return bytes(self._bytes[letter] for letter in token)
        one = _ONE_BYTE.fullmatch(token)
        if one:
            return bytes.fromhex(one[1])
        return token.replace(_SPACE, " ").encode()
