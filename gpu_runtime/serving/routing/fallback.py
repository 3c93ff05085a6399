"""Chooses the stand-ins of a model, which answer calls that the model cannot answer, and guards the use of clouds.

The order is: first the requested model, then the local stand-ins that `tasks.yaml` names for it, then the clouds that
`tasks.yaml` names for it. If none can answer, the call is refused with 503. Local stand-ins with smaller contexts are
tried first, since they need less memory. If `tasks.yaml` has no line for the model, no other model answers. This module
is pure, except that the cloud guard reads and writes a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...errors import BadSetting
from ...facts import Value
from ...private_paths import make_directory, replace_file, state_home

# The OpenAI-compatible address of each provider. An address in the environment overrides it.
KNOWN_CLOUDS = {
    "openai": "https://api.openai.com/v1",
    "claude": "https://api.anthropic.com/v1",
    "google": "https://generativelanguage.googleapis.com/v1beta/openai",
}
_PROVIDER = re.compile(r"([a-z][a-z0-9_-]{0,31}):(?=.)")


class Choice(Value):
    """A model that may answer a call. If it is not the requested model, `because` tells the caller why it answers."""

    model: str
    cloud: bool = False
    because: str = ""


class Cloud(Value):
    """The address, the name and the key with which a cloud's model is called."""

    provider: str
    base_url: str
    key: str
    model: str  # the provider's own name of the model

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request, with the key."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def __repr__(self) -> str:
        return f"<{self.provider}:{self.model} at {self.base_url}>"  # never with its key


def is_cloud(name: str, known: Callable[[str], bool]) -> bool:
    """Whether `name` is a cloud's model: it has the form `provider:model` and is not `known` as a local model.

    >>> is_cloud("claude:sonnet", lambda name: False), is_cloud("llama3:8b", lambda name: True), is_cloud("qwen", bool)
    (True, False, False)
    """
    return _PROVIDER.match(name) is not None and not name.startswith("task:") and not known(name)


def address_variable(provider: str) -> str:
    """The environment variable with the address of this `provider`.

    >>> address_variable("my-host")
    'MY_HOST_BASE_URL'
    """
    return f"{provider.upper().replace('-', '_')}_BASE_URL"


def is_configured_cloud(name: str, environment: Mapping[str, str]) -> bool:
    """Whether `name` is a model of a provider whose address is known, from KNOWN_CLOUDS or the `environment`.

    >>> is_configured_cloud("claude:sonnet", {}), is_configured_cloud("qwen3:8b", {})
    (True, False)
    """
    provider, colon, model = name.partition(":")
    if not colon or not model:
        return False
    return provider in KNOWN_CLOUDS or bool(environment.get(address_variable(provider)))


def cloud_of(name: str, environment: Mapping[str, str]) -> Cloud | str:
    """The cloud of the model `name` (`provider:model`) in the `environment`, or a sentence on what is missing."""
    provider, _, model = name.partition(":")
    variable = address_variable(provider)
    key_variable = variable.replace("_BASE_URL", "_API_KEY")
    url = environment.get(variable) or KNOWN_CLOUDS.get(provider, "")
    key = environment.get(key_variable, "")
    if not url:
        return f"no {variable} is set"
    if not url.startswith(("https://", "http://")):
        return f"{variable} is no http address"
    if not key and not environment.get(variable):
        return f"no {key_variable} is set"
    return Cloud(provider, url.rstrip("/"), key, model)


def guarded(choices: Iterable[Choice], allow_cloud: bool) -> tuple[Choice, ...]:
    """The `choices`; without clouds after the first, if `allow_cloud` is false.

    The first choice is the requested model. If it is a cloud's, the caller wants that cloud. Source: Model Boss,
    Cloud-fallback guard.
    """
    first, *others = choices
    return (first, *(choice for choice in others if allow_cloud or not choice.cloud))


def chain(
    asked: str,
    others: Iterable[str],
    context: Callable[[str], int | None],
    known: Callable[[str], bool],
    allow_cloud: Callable[[], bool],
) -> tuple[Choice, ...]:
    """The models that may answer a call of `asked`, in the order in which they are tried.

    `others` are the stand-ins of `tasks.yaml`. `context(name)` is a model's context length in tokens, and `known(name)`
    is whether a name is a local model. `allow_cloud()`, which reads a file, is called only if a stand-in is a cloud.

    >>> contexts = {"big": 32768, "small": 4096}
    >>> others = ["claude:haiku", "big", "small"]
    >>> [c.model for c in chain("qwen", others, contexts.get, contexts.__contains__, lambda: True)]
    ['qwen', 'small', 'big', 'claude:haiku']
    """
    names = [name for name in dict.fromkeys(others) if name != asked]
    local = [name for name in names if not is_cloud(name, known)]
    local.sort(key=lambda name: context(name) or float("inf"))
    clouds = [name for name in names if is_cloud(name, known)]
    reason = f"{asked} could not answer"
    choices = [Choice(asked, is_cloud(asked, known))]
    choices += [Choice(name, because=reason) for name in local]
    choices += [Choice(name, True, reason) for name in clouds]
    return guarded(choices, not clouds or allow_cloud())


def guard_file() -> Path:
    """The path of the cloud guard's file, in the state directory, which survives restarts."""
    return state_home() / "serving.json"


class CloudGuard:
    """Whether a cloud may stand in for a local model. The value is in a file, which survives restarts."""

    def __init__(self, path: Path | None, seed: bool) -> None:
        """The value is in the file `path`, or in memory if that is None; it is `seed` until `allow` is called."""
        self._path = path
        self._seed = seed
        self._in_memory: bool | None = None

    @property
    def allowed(self) -> bool:
        """The value. False if the file has no readable value, so that no data leaves this machine."""
        if self._path is None:
            return self._seed if self._in_memory is None else self._in_memory
        try:
            value = json.loads(self._path.read_text())["allowCloudFallback"]
        except FileNotFoundError:  # `allow` was never called
            return self._seed
        except (OSError, ValueError, KeyError, TypeError):  # unknown: no data may leave
            return False
        return value is True

    def allow(self, allowed: bool) -> None:
        """Sets the value. Raises BadSetting if `allowed` is not a bool, or the file cannot be written."""
        if not isinstance(allowed, bool):
            raise BadSetting("allowCloudFallback", allowed, "true or false")
        if self._path is None:
            self._in_memory = allowed
            return
        try:
            make_directory(self._path.parent)
            replace_file(self._path, f"{json.dumps({'allowCloudFallback': allowed})}\n".encode())
        except OSError as error:
            why = f"kept in {self._path}, which cannot be written ({error.strerror or error})"
            raise BadSetting("allowCloudFallback", allowed, why) from None
