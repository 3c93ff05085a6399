"""Changes a call before an engine sees it, by the client's profile, the aliases and the thinking mode. Pure.

A field of the body overrides the profile, and the profile overrides the model's entry in the catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...facts import parse_importance
from ..fields import OTHER_NAMES
from ..requests import Call, Json, Refused, bad, prompts_of
from .tasks import Profile

# Some templates read these words in the last user message.
SWITCHES = {True: "/think", False: "/no_think"}


def _after(system: str, prompt: str | list[int]) -> str:
    """The `prompt` after the text `system`. Raises Refused (400) for a prompt that is a list of tokens."""
    if not isinstance(prompt, str):
        raise bad("prompt", prompt, "text: this client's profile adds a system text to it")
    return f"{system}\n\n{prompt}"


def apply_profile(call: Call, profile: Profile | None) -> Call:
    """The `call`, in which each missing value is taken from the client's `profile`.

    Its system text is always added to the prompt. Of two cooldowns the longer one applies.
    """
    if profile is None:
        return call
    given = {OTHER_NAMES.get(name) for name in call.body}
    defaults = {name: value for name, value in profile.defaults.items() if name not in given}
    body = {**defaults, **call.body}
    if call.model == "default" and profile.model:
        body["model"] = profile.model
    if profile.system and call.kind == "chat":
        body["messages"] = with_system(body["messages"], profile.system)
    elif profile.system and call.kind == "completions":
        prompts = [_after(profile.system, prompt) for prompt in prompts_of(body)]
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
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


def with_alias(call: Call, aliases: Mapping[str, str]) -> Call:
    """The `call`, in which an alias is replaced by its model or task. `aliases` are the aliases of `tasks.yaml`."""
    model = aliases.get(call.model)
    return call if model is None else replace(call, model=model, body={**call.body, "model": model})


def with_system(messages: list[Json], text: str) -> list[Json]:
    """The conversation `messages` with `text` as a system message at its beginning, or in the one that it begins with.

    Many templates allow only one system message, and only in the first place.

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
