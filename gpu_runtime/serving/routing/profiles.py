"""What changes the prompt before an engine sees it: the client's profile, thinking mode, and the chat template.

Pure. A field of the body wins over the profile, which wins over the model's entry in the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...facts import parse_importance
from ..requests import Call
from .tasks import Profile

SWITCHES = {
    True: "/think",
    False: "/no_think",
}  # what models without a template switch read in the last user message


def profiled(call: Call, profile: Profile | None) -> Call:
    """The call as its client's profile completes it."""
    if profile is None:
        return call
    body = {**profile.defaults, **call.body}
    if call.model == "default" and profile.model:
        body["model"] = profile.model
    if profile.system and call.kind == "chat":
        body["messages"] = with_system(body["messages"], profile.system)
    elif profile.system and call.kind == "completions":
        body["prompt"] = f"{profile.system}\n\n{body['prompt']}"
    word = profile.importance
    importance = None if word is None else parse_importance(word)
    return replace(
        call,
        body=body,
        model=body["model"],
        importance=importance if call.importance is None else call.importance,
        thinking=profile.thinking if call.thinking is None else call.thinking,
        stay_warm=profile.stay_warm_s if call.stay_warm is None else call.stay_warm,
        cooldown=max(call.cooldown, profile.cooldown_s),
    )


def with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with that text at its head: in its own system message where it has one, since many templates
    allow only one and only there.

    >>> with_system([{"role": "user", "content": "hi"}], "Be brief.")[0]
    {'role': 'system', 'content': 'Be brief.'}
    >>> with_system([{"role": "system", "content": "Speak French."}], "Be brief.")
    [{'role': 'system', 'content': 'Be brief.\\n\\nSpeak French.'}]
    """
    first = messages[0]
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def thinking(call: Call, options: Mapping[str, Any]) -> bool | None:
    """Whether the model is to think aloud first; None: as its template has it."""
    said = options.get("thinking") if call.thinking is None else call.thinking
    return said if isinstance(said, bool) else None


def thought(
    messages: list[dict[str, Any]], think: bool | None, template: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The conversation, and what to give the chat template, so that the model thinks or does not.

    A template that knows `enable_thinking` is told so. To others, and where the template is not known, it is said at
    the end of the last user message, as Qwen 3 introduced it.

    >>> thought([{"role": "user", "content": "hi"}], False, "{% if enable_thinking %}…")
    ([{'role': 'user', 'content': 'hi'}], {'enable_thinking': False})
    >>> thought([{"role": "user", "content": "hi"}], False, "{{ messages }}")
    ([{'role': 'user', 'content': 'hi /no_think'}], {})
    """
    if think is None:
        return messages, {}
    if template is not None and "enable_thinking" in template:
        return messages, {"enable_thinking": think}
    for at in range(len(messages) - 1, -1, -1):
        content = messages[at].get("content")
        if messages[at].get("role") == "user" and isinstance(content, str):
            return [
                *messages[:at],
                {**messages[at], "content": f"{content} {SWITCHES[think]}"},
                *messages[at + 1 :],
            ], {}
    return messages, {}
