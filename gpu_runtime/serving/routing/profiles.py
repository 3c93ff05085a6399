"""Changes of the prompt before an engine sees it: the client's profile and the thinking mode.

Pure. A field of the body overrides the profile, which overrides the model's entry in the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...facts import parse_importance
from ..requests import Call
from .tasks import Profile

# Models without a switch in their template read these words in the last user message.
SWITCHES = {True: "/think", False: "/no_think"}


def apply_profile(call: Call, profile: Profile | None) -> Call:
    """The `call` with the values of its client's `profile` where the call has none."""
    if profile is None:
        return call
    body = {**profile.defaults, **call.body}
    if call.model == "default" and profile.model:
        body["model"] = profile.model
    if profile.system and call.kind == "chat":
        body["messages"] = with_system(body["messages"], profile.system)
    elif profile.system and call.kind == "completions":
        body["prompt"] = f"{profile.system}\n\n{body['prompt']}"
    importance = call.importance
    if importance is None and profile.importance is not None:
        importance = parse_importance(profile.importance)
    return replace(
        call,
        body=body,
        model=body["model"],
        importance=importance,
        thinking=profile.thinking if call.thinking is None else call.thinking,
        stay_warm=profile.stay_warm_s if call.stay_warm is None else call.stay_warm,
        cooldown=max(call.cooldown, profile.cooldown_s),
    )


def with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation `messages` with `text` at its head.

    The text is put into the conversation's own system message if it has one: many templates allow only one, and only
    in the first place.

    >>> with_system([{"role": "user", "content": "hi"}], "Be brief.")[0]
    {'role': 'system', 'content': 'Be brief.'}
    >>> with_system([{"role": "system", "content": "Speak French."}], "Be brief.")
    [{'role': 'system', 'content': 'Be brief.\\n\\nSpeak French.'}]
    """
    first = messages[0]
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def wants_thinking(call: Call, options: Mapping[str, Any]) -> bool | None:
    """Whether the model thinks aloud first: by the `call`, else by the model's `options`. None: by its template."""
    thinking = options.get("thinking") if call.thinking is None else call.thinking
    return thinking if isinstance(thinking, bool) else None


def with_thinking(
    messages: list[dict[str, Any]], think: bool | None, template: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation `messages`, and variables for the chat `template`, with thinking on or off as in `think`.

    A template that reads `enable_thinking` gets that variable. For all others, and for an unknown template, a word is
    added to the last user message, as Qwen 3 introduced it.

    >>> with_thinking([{"role": "user", "content": "hi"}], False, "{% if enable_thinking %}…")
    ([{'role': 'user', 'content': 'hi'}], {'enable_thinking': False})
    >>> with_thinking([{"role": "user", "content": "hi"}], False, "{{ messages }}")
    ([{'role': 'user', 'content': 'hi /no_think'}], {})
    """
    if think is None:
        return messages, {}
    if template is not None and "enable_thinking" in template:
        return messages, {"enable_thinking": think}
    for at in reversed(range(len(messages))):
        message = messages[at]
        content = message.get("content")
        if message.get("role") == "user" and isinstance(content, str):
            changed = {**message, "content": f"{content} {SWITCHES[think]}"}
            return [*messages[:at], changed, *messages[at + 1 :]], {}
    return messages, {}
