"""Chat templates: a conversation into the one text that a model was trained to go on from.

They are Jinja, and come with models, which are strangers' files: they run in a sandbox.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...errors import BadSetting

MOST_LETTERS = 1 << 20


class BadConversation(ValueError):
    """A template refused the conversation, such as two user messages in a row."""


def override(options: Mapping[str, Any]) -> str | None:
    """The template that the catalogue gives the model: its text, or a file that holds it. Raises BadSetting."""
    said = options.get("chat_template")
    if not said:
        return None
    if not isinstance(said, str):
        raise BadSetting(
            "chat_template", said, "a Jinja template, or the path of a file that holds one"
        )
    if "{" in said:
        return said
    try:
        return Path(os.path.expanduser(said)).read_text()[:MOST_LETTERS]
    except OSError as error:
        raise BadSetting(
            "chat_template",
            said,
            f"a Jinja template, or the path of a file that holds one ({error.strerror or error})",
        ) from None


def render(template: str, messages: list[dict[str, Any]], **given: Any) -> str:
    """The prompt, up to where the model's answer begins. Raises BadConversation where the template refuses."""
    try:
        return _compiled(template).render(
            messages=_plain(messages),
            add_generation_prompt=True,
            **{"bos_token": "", "eos_token": "", **given},
        )
    except (
        Exception
    ) as error:  # a stranger's code: whatever it raises, it does not take this conversation
        raise BadConversation(
            f"the model's chat template does not take this conversation: {error}"
        ) from None


def _plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts of text joined, as most templates know only text."""
    return [{**message, "content": text_of(message.get("content"))} for message in messages]


def text_of(content: Any) -> str:
    """The text of a message's content. Raises BadConversation for pictures and the like.

    >>> text_of([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])
    'one two'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    kinds = {part.get("type") for part in content} - {"text"}
    if kinds or not all(isinstance(part.get("text"), str) for part in content):
        raise BadConversation(
            f"this model reads text only, and the message has parts of type "
            f"{', '.join(sorted(map(str, kinds))) or 'text without any'}"
        )
    return "".join(part["text"] for part in content)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise TemplateError(message)
