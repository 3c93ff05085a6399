"""`tasks.yaml`: its content, the file, and what it changes in a call.

It has tasks, clients' profiles and fallbacks:

    tasks:                                  # addressed as  model: "task:classify"
      classify:
        candidates: [qwen-4b, phi-4, claude:haiku]
        keep_alive_s: 120                   # how long the model stays warm after a call
        pin_primary: true                   # a warm candidate does not go before the first one
        budget_s: 10                        # seconds for the whole answer
    clients:                                # by x_client_id
      bot: {system: "Be brief.", importance: low, thinking: false, defaults: {temperature: 0.2}, cooldown_s: 5}
    fallback:                               # which models answer when one cannot; "*": for any other model
      qwen-32b: [qwen-4b, claude:sonnet]
    aliases: {gpt-4o: qwen-32b}             # further names of models and tasks
    preload: [qwen-4b]                      # loaded when the server starts

A mistake is reported with the file, the line and the name of the task. A field of a call's body overrides the profile,
and the profile overrides the model's entry in the catalogue.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from .. import files
from ..catalog import documents
from ..errors import BadDocument
from ..facts import IMPORTANCE, Value, parse_importance
from ..files import config_home, stamp
from .requests import OTHER_NAMES, Call, Json, Refused, bad, check_numbers, prompts_of

Seconds = Annotated[float, Meta(ge=0, le=86_400)]


class Task(Value, forbid_unknown_fields=True):
    """A purpose such as `classify`, and the models that may serve it. The best model is first."""

    candidates: Annotated[tuple[str, ...], Meta(min_length=1)]
    keep_alive_s: Seconds | None = None
    pin_primary: bool = False
    budget_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    replicas: bool = False  # if true, the candidates are equal: the shortest queue goes first


class Profile(Value, forbid_unknown_fields=True):
    """Default values for the calls of one client. A value in the call itself overrides them."""

    system: str = ""  # put before the conversation
    model: str = ""  # for `model: "default"`
    importance: int | str | None = None
    thinking: bool | None = None
    stay_warm_s: Seconds | None = None
    cooldown_s: Seconds = 0.0
    defaults: dict[str, Any] = {}  # values of other fields of the body, such as temperature


class ServingConfig(Value, forbid_unknown_fields=True):
    """The content of `tasks.yaml`."""

    tasks: dict[str, Task] = {}
    clients: dict[str, Profile] = {}
    fallback: dict[str, tuple[str, ...]] = {}
    aliases: dict[str, str] = {}
    preload: tuple[str, ...] = ()

    def fallbacks(self, model: str) -> tuple[str, ...]:
        """The models that may answer when `model` cannot."""
        return self.fallback.get(model, self.fallback.get("*", ()))

    def named_models(self) -> Iterator[tuple[str, str]]:
        """Yields the field and the name, for each name of a model, a cloud or a task in the file."""
        for name, task in self.tasks.items():
            yield from ((f"tasks.{name}.candidates", model) for model in task.candidates)
        for name, profile in self.clients.items():
            if profile.model:
                yield f"clients.{name}.model", profile.model
        for name, models in self.fallback.items():
            own = () if name == "*" else (name,)
            yield from ((f"fallback.{name}", model) for model in (*own, *models))
        yield from ((f"aliases.{name}", model) for name, model in self.aliases.items())
        yield from (("preload", model) for model in self.preload)


# -- the file

CHECK_SECONDS = 1.0  # the time between two checks of the file
FIELDS_OF_CALLS = ("model", "messages", "prompt", "input", "stream")  # a profile may not set them
_SECTIONS: dict[str, Any] = {
    "tasks": Task,
    "clients": Profile,
    "fallback": tuple[str, ...],
    "aliases": str,
    "preload": tuple[str, ...],  # one list, without names
}
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
log = logging.getLogger("gpu_runtime")


def default_file() -> Path:
    """The path of `tasks.yaml` if GPU_TASKS is not set."""
    return config_home() / "tasks.yaml"


class TasksFile:
    """The content of one file, which is read again after each change. After a mistake, the earlier content stays."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        clock: Callable[[], float],
        doubts: Callable[[ServingConfig], Iterable[str]] = lambda config: (),
    ) -> None:
        """The content of the file `path`. A file that does not exist has no content. `clock` returns seconds.

        `doubts(content)` are sentences on names that may be mistakes. They are logged when the content is first used,
        and after each change. Raises BadDocument.
        """
        self.path = path
        self._clock = clock
        self._doubts = doubts
        self._is_new = True  # whether the doubts have not been logged
        self._stamp = stamp(path)
        self._checked_at = clock()
        self._content = read_serving_config(path)

    def content(self) -> ServingConfig:
        """The content of the file, checked once a second. If it was removed, it stays until `reload` is called."""
        if self._clock() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._clock()
            found = stamp(self.path)
            if found is not None and found != self._stamp:
                self.reload()
        if self._is_new:
            self._is_new = False
            if self._stamp is None and self.path not in (None, default_file()):
                log.warning("there is no file %s; it is read once it exists", self.path)
            for doubt in self._doubts(self._content):
                log.warning("%s, %s", self.path, doubt)
        return self._content

    def reload(self) -> None:
        """Reads the file now, also if it was removed. If the file has a mistake, the earlier content stays."""
        self._stamp = stamp(self.path)
        try:
            self._content = read_serving_config(self.path)
            self._is_new = True
        except BadDocument as error:
            text = "%s was changed and has a mistake; the earlier content stays: %s"
            log.warning(text, self.path, error)
        else:
            log.info("%s was read again", self.path)


def read_serving_config(path: str | os.PathLike[str] | None) -> ServingConfig:
    """The content of the file `path`; empty if there is none. Raises BadDocument, with the line and field."""
    if path is None or not os.path.exists(path):
        return ServingConfig()
    name = os.fspath(path)
    try:
        with files.open_regular(name) as file:
            data = file.read(documents.MOST_BYTES + 1)
    except OSError as error:
        raise BadDocument(name, 0, "", f"it cannot be read ({error.strerror or error})") from None
    found = documents.read(data, name)
    if len(found) > 1:
        raise found[1].wrong((), "the file must have one document; a second one begins here")
    return _config(found[0]) if found else ServingConfig()


def _config(document: documents.Document) -> ServingConfig:
    """The `document` as a ServingConfig. Raises BadDocument."""
    content = document.value
    if not isinstance(content, dict):
        raise document.wrong((), "the file must have sections such as tasks")
    sections = {}
    for section, entries in content.items():
        if section not in _SECTIONS:
            problem = f"unknown field `{section}`; known: {', '.join(_SECTIONS)}"
            raise BadDocument(document.file, document.line((section,)), "", problem)
        sections[section] = _section(document, section, entries)
    aliases: dict[str, str] = sections.get("aliases", {})
    for name, model in aliases.items():
        if model in aliases:
            raise document.wrong(("aliases", name), f"{model} is an alias too; name its model")
    return ServingConfig(**sections)


def _section(document: documents.Document, section: str, entries: Any) -> Any:
    if entries is None:
        return {}
    if section == "preload":
        try:
            return msgspec.convert(entries, _SECTIONS[section])
        except msgspec.ValidationError:
            raise document.wrong((section,), "it must be a list of models") from None
    if not isinstance(entries, dict):
        raise document.wrong((section,), "it must have one entry for each name")
    found = {}
    for name, entry in entries.items():
        try:
            found[name] = msgspec.convert(entry, _SECTIONS[section])
        except msgspec.ValidationError as error:
            problem, _, field = str(error).partition(" - at ")
            steps = [step or int(index) for step, index in _STEP.findall(field)]
            raise document.wrong((section, name, *steps), problem) from None
        if section == "clients" and (wrong := _fault(found[name])):
            raise document.wrong((section, name, *wrong[:-1]), wrong[-1])
    return found


def _fault(profile: Profile) -> tuple[str, ...]:
    """The steps to the first wrong value of a `profile`, by the rules for a request's body, and what is wrong."""
    importance = profile.importance
    unknown_word = isinstance(importance, str) and importance not in IMPORTANCE
    out_of_range = isinstance(importance, int) and not 1 <= importance <= 100
    if unknown_word or out_of_range:
        known = f"none of {', '.join(IMPORTANCE)}, nor a number from 1 to 100"
        return "importance", f"{importance!r} is {known}"
    for field in profile.defaults:
        if field in FIELDS_OF_CALLS or field.startswith("x_"):
            return "defaults", field, "only a call can set it, not a profile"
    try:
        check_numbers(profile.defaults)
    except Refused as refused:
        return "defaults", refused.facts["param"], refused.message
    return ()


# -- the profile and the alias of a call


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
        prompts = prompts_of(body)
        for at, prompt in enumerate(prompts):
            if not isinstance(prompt, str):
                raise bad("prompt", prompt, "text: this client's profile adds a system text to it")
            prompts[at] = f"{profile.system}\n\n{prompt}"
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
