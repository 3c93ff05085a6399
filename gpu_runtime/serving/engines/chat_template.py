"""Chat templates turn a conversation into the single text that a model was trained to continue.

Templates are Jinja code that comes with a model, from an unknown author. So they run in a sandbox.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ... import limited_files
from ...errors import BadSetting
from ..requests import Json
from .tool_calls import arguments_of

MAX_LETTERS = 1 << 20  # of a template's file; the rest of a longer file is ignored
_EXPECTED = "a Jinja template, or the path of a file that holds one"


class BadConversation(ValueError):
    """Raised when a template rejects a conversation, for example one with two user messages in a row."""


def override(options: Mapping[str, Any]) -> str | None:
    """The chat template in a model's catalogue `options`: itself, or the path of its file. None if there is none.

    Raises BadSetting if the option is no text, or if the file cannot be read.
    """
    value = options.get("chat_template")
    if not value:
        return None
    if not isinstance(value, str):
        raise BadSetting("chat_template", value, _EXPECTED)
    if "{" in value:
        return value
    try:
        return limited_files.text(os.path.expanduser(value))[:MAX_LETTERS]
    except OSError as error:
        expected = f"{_EXPECTED} ({error.strerror or error})"
        raise BadSetting("chat_template", value, expected) from None


def render(
    template: str, messages: list[Json], *, takes_images: bool = False, **variables: Any
) -> str:
    """The prompt that `template` makes of `messages`. The prompt ends where the model's answer begins.

    With `takes_images`, the template gets each content as a list of texts and images, else as text. `variables` are
    further variables of the template. Raises BadConversation if the template rejects the messages.
    """
    try:
        return _compiled(template).render(
            messages=_as_expected(messages, _parts_of if takes_images else text_of),
            add_generation_prompt=True,
            **{"bos_token": "", "eos_token": "", **variables},
        )
    except Exception as error:  # an unknown author's code may raise anything
        raise BadConversation(
            f"the model's chat template does not take this conversation: {error}"
        ) from None


def text_of(content: Any) -> str:
    """The text of a message's `content`. Raises BadConversation for images and other parts.

    >>> text_of([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])
    'one two'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    kinds = {part.get("type") for part in content} - {"text"}
    if kinds or not all(isinstance(part.get("text"), str) for part in content):
        named = ", ".join(sorted(map(str, kinds))) or "text without any"
        raise BadConversation(f"this model does not read parts of type {named}")
    return "".join(part["text"] for part in content)


def _parts_of(content: Any) -> list[Json]:
    """The texts and images of a message's `content`. Raises BadConversation for other parts.

    >>> _parts_of([{"type": "image_url", "image_url": {}}, {"type": "text", "text": "one"}])
    [{'type': 'image'}, {'type': 'text', 'text': 'one'}]
    """
    if not isinstance(content, list):
        return [{"type": "text", "text": content or ""}]
    parts = []
    for part in content:
        if part.get("type") == "image_url":
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": text_of([part])})
    return parts


def _as_expected(messages: list[Json], content_of: Callable[[Any], Any]) -> list[Json]:
    """The `messages` as templates expect them: contents by `content_of`, no `developer`, arguments as objects."""
    plain = []
    for message in messages:
        changed = {**message, "content": content_of(message.get("content"))}
        if message["role"] == "developer":
            changed["role"] = "system"
        if message.get("tool_calls"):
            changed["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        plain.append(changed)
    return plain


def _with_object(call: Json) -> Json:
    """The tool `call` with its arguments as an object. OpenAI's format has them as text."""
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        arguments = arguments_of(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)
