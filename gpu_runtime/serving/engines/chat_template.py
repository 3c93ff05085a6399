"""What a chat template decides: the text that a model continues, the switch for its thoughts, and their tags.

A template turns a conversation into the single text that its model was trained to continue. It is Jinja code that comes
with a model, from an unknown author. So it runs in a sandbox.
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

from ... import files
from ...errors import BadSetting
from ...stop_text import held_back
from ..requests import Call, Json, Refused
from .openai_format import arguments_of

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
        return files.read_text(os.path.expanduser(value))[:MAX_LETTERS]
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


# -- whether the model writes its thoughts

# Some templates read these words in the last user message.
SWITCHES = {True: "/think", False: "/no_think"}


def wants_thinking(call: Call, options: Mapping[str, Any]) -> bool | None:
    """Whether the model writes its thoughts: the `call` decides, else the model's `options`; None: its template."""
    thinking = options.get("thinking") if call.thinking is None else call.thinking
    return thinking if isinstance(thinking, bool) else None


def with_thinking(
    body: Mapping[str, Any], think: bool | None, template: str, model: str
) -> tuple[list[Json], Json]:
    """The messages of a call's `body`, and the variables for the chat `template`, with which `model` thinks or not.

    `think` says which; None changes nothing. A template that reads `enable_thinking` gets that variable. If it reads
    `/think` or `/no_think`, the word for `think` is added to the last user message.

    Raises Refused (400) if the template has no such switch, unless `think` is false and the template has no `<think>`,
    because such a model shows no thoughts, or `think` is true only because of a `reasoning_effort`, which many clients
    always send. A template that reads the effort gets it.

    >>> hi = {"messages": [{"role": "user", "content": "hi"}]}
    >>> with_thinking(hi, False, "{% if enable_thinking %}…", "qwen")
    ([{'role': 'user', 'content': 'hi'}], {'enable_thinking': False})
    >>> with_thinking(hi, False, "{% if '/no_think' in …", "smol")
    ([{'role': 'user', 'content': 'hi /no_think'}], {})
    >>> with_thinking({**hi, "reasoning_effort": "low"}, True, "Reasoning: {{ reasoning_effort }}", "oss")
    ([{'role': 'user', 'content': 'hi'}], {'reasoning_effort': 'low'})
    """
    messages, effort = body["messages"], body.get("reasoning_effort")
    if think is None:
        return messages, {}
    variables = {"enable_thinking": think, "reasoning_effort": effort}
    read = {
        name: value for name, value in variables.items() if name in template and value is not None
    }
    if read:
        return messages, read
    if not any(word in template for word in SWITCHES.values()):
        if (think and effort) or (not think and template and "<think>" not in template):
            return messages, {}
        field = "reasoning_effort" if effort else "x_thinking"
        text = f"{model} has no switch for thinking that can be set here; leave {field} out"
        raise Refused(400, "no_thinking_switch", text, param=field)
    for at in reversed(range(len(messages))):
        message = messages[at]
        content = message.get("content")
        if message.get("role") == "user" and isinstance(content, str):
            changed = {**message, "content": f"{content} {SWITCHES[think]}"}
            return [*messages[:at], changed, *messages[at + 1 :]], {}
    return messages, {}


# -- the thoughts in an answer
#
# A model that thinks writes its thoughts between two tags before its answer. Some templates write the first tag
# themselves, at the end of the prompt.

TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))  # DeepSeek and Qwen; Mistral


@functools.lru_cache(maxsize=64)
def tags_of(template: str) -> tuple[str, str] | None:
    """The tags around the thoughts of the model with this chat `template`, or None if the template shows none.

    >>> tags_of("{{ '<think>' }}"), tags_of("{{ messages }}")
    (('<think>', '</think>'), None)
    """
    return next((tags for tags in TAGS if any(tag in template for tag in tags)), None)


class Thoughts:
    """Separates thoughts from the answer. The text arrives in pieces.

    >>> reader = Thoughts(("<think>", "</think>"), begun=False)
    >>> [reader.feed(text) for text in ("<thi", "nk>17 is", " prime.</think>", "Yes.")]
    [('', ''), ('17 is', ''), (' prime.', ''), ('', 'Yes.')]
    """

    def __init__(self, tags: tuple[str, str], begun: bool) -> None:
        """The thoughts are between the `tags`. If `begun`, the prompt ends with the first tag."""
        self._opens, self._closes = tags
        self._held = ""
        # True: the text belongs to the thoughts. False: it belongs to the answer. None: this is not known yet.
        self._thinks: bool | None = True if begun else None
        self._at_start = True  # of the thoughts or of the answer, where spaces are left out

    def feed(self, text: str) -> tuple[str, str]:
        """Adds `text`. Returns the new part of the thoughts, and the new part of the answer."""
        self._held += text
        if self._thinks is None:
            self._look_for_beginning()
        thought = self._take_thought() if self._thinks else ""
        answer = ""
        if self._thinks is False:
            answer, self._held = self._without_spaces(self._held), ""
        return thought, answer

    def rest(self) -> tuple[str, str]:
        """The held-back part of the thoughts, and that of the answer. Call this when no more text follows."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self._thinks else ("", held)

    def _look_for_beginning(self) -> None:
        begun = self._held.lstrip()
        if begun.startswith(self._opens):
            self._thinks = True
            self._held = begun.removeprefix(self._opens)
        elif not self._opens.startswith(begun):
            # Without thoughts, the answer keeps its first spaces.
            self._thinks = self._at_start = False

    def _take_thought(self) -> str:
        """The new part of the thoughts. Spaces at its end, and text that may begin the closing tag, are held back."""
        at = self._held.find(self._closes)
        if at >= 0:
            thought = self._without_spaces(self._held[:at].rstrip())
            self._held = self._held[at + len(self._closes) :]
            self._thinks, self._at_start = False, True
            return thought
        safe = self._held[: len(self._held) - held_back(self._held, (self._closes,))].rstrip()
        self._held = self._held[len(safe) :]
        return self._without_spaces(safe)

    def _without_spaces(self, text: str) -> str:
        """The `text`, without its first spaces at the start of the thoughts or of the answer."""
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text
