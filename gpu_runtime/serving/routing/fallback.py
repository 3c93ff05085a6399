"""Who answers in a model's place when it cannot, and whether that may be a cloud.

Pure, but for the guard, which is a file. The chain is: the model that was asked for, then the other local ones that
`tasks.yaml` names for it, those of smaller context first, since they need less memory; then clouds; then 503. Without a
line in that file nobody answers for a model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ...errors import BadSetting
from ...facts import Value

KNOWN_CLOUDS = {  # each provider's OpenAI-compatible address, where the environment gives no other
    "openai": "https://api.openai.com/v1",
    "claude": "https://api.anthropic.com/v1",
    "google": "https://generativelanguage.googleapis.com/v1beta/openai",
}
_PROVIDER = re.compile(r"([a-z][a-z0-9_-]{0,31}):(?=.)")


class Choice(Value):
    """A model that may answer. `because` says why it stands where it stands."""

    model: str
    cloud: bool = False
    because: str = ""


class Cloud(Value):
    """Where a cloud's models are called."""

    provider: str
    base_url: str
    key: str
    model: str  # the provider's own name for it

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def __repr__(self) -> str:
        return f"<{self.provider}:{self.model} at {self.base_url}>"  # never with its key


def is_cloud(name: str, known: Callable[[str], bool]) -> bool:
    """Whether a name marks a cloud's model: `provider:model`, where no local model is called that.

    >>> is_cloud("claude:sonnet", lambda name: False), is_cloud("llama3:8b", lambda name: True), is_cloud("qwen", bool)
    (True, False, False)
    """
    return _PROVIDER.match(name) is not None and not name.startswith("task:") and not known(name)


def cloud_of(name: str, environment: Mapping[str, str]) -> Cloud | str:
    """Where to call `provider:model`, by `PROVIDER_API_KEY` and `PROVIDER_BASE_URL`; or what is missing, in words."""
    provider, _, model = name.partition(":")
    prefix = provider.upper().replace("-", "_")
    url = environment.get(f"{prefix}_BASE_URL") or KNOWN_CLOUDS.get(provider, "")
    key = environment.get(f"{prefix}_API_KEY", "")
    if not url:
        return f"no {prefix}_BASE_URL is set"
    if not url.startswith(("https://", "http://")):
        return f"{prefix}_BASE_URL is no http address"
    if not key and not environment.get(f"{prefix}_BASE_URL"):
        return f"no {prefix}_API_KEY is set"
    return Cloud(provider, url.rstrip("/"), key, model)


def guarded(choices: Iterable[Choice], allow_cloud: bool) -> tuple[Choice, ...]:
    """The choices without a cloud in any but the first place, where clouds may not stand in.

    The first is what was asked for: a cloud there is a deliberate choice, and is never blocked; so the list is never
    emptied. Source: Model Boss, Cloud-fallback guard.
    """
    first, *others = choices
    return (first, *(choice for choice in others if allow_cloud or not choice.cloud))


def chain(
    asked: str,
    others: Iterable[str],
    context: Callable[[str], int | None],
    known: Callable[[str], bool],
    allow_cloud: bool,
) -> tuple[Choice, ...]:
    """Who may answer for a model, in the order in which they are tried.

    >>> contexts = {"big": 32768, "small": 4096}
    >>> [c.model for c in chain("qwen", ["claude:haiku", "big", "small"], contexts.get, contexts.__contains__, True)]
    ['qwen', 'small', 'big', 'claude:haiku']
    """
    rest = [name for name in dict.fromkeys(others) if name != asked]
    local = [name for name in rest if not is_cloud(name, known)]
    clouds = [name for name in rest if is_cloud(name, known)]
    local.sort(key=lambda name: context(name) or float("inf"))
    return guarded(
        (
            Choice(asked, is_cloud(asked, known)),
            *(Choice(name, because=f"{asked} could not answer") for name in local),
            *(Choice(name, True, f"{asked} could not answer") for name in clouds),
        ),
        allow_cloud,
    )


class CloudGuard:
    """Whether a cloud may stand in for a local model: one file, which survives restarts. `path=None`: only in memory.

    `seed` (MODEL_BOSS_ALLOW_CLOUD_FALLBACK) holds until somebody says otherwise.
    """

    def __init__(self, path: Path | None, seed: bool) -> None:
        self._path, self._seed = path, seed
        self._said: bool | None = None

    @property
    def allowed(self) -> bool:
        if self._path is None:
            return self._seed if self._said is None else self._said
        try:
            said = json.loads(self._path.read_text())["allowCloudFallback"]
        except FileNotFoundError:
            return self._seed
        except (OSError, ValueError, KeyError, TypeError):
            return False  # somebody had said something, and nobody knows what: nothing leaves the house
        return said is True

    def allow(self, allowed: bool) -> None:
        """Raises BadSetting where that is not true or false, or cannot be kept."""
        if not isinstance(allowed, bool):
            raise BadSetting("allowCloudFallback", allowed, "true or false")
        if self._path is None:
            self._said = allowed
            return
        draft = self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_text(json.dumps({"allowCloudFallback": allowed}) + "\n")
            os.replace(draft, self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise BadSetting(
                "allowCloudFallback",
                allowed,
                f"kept in {self._path}, which cannot be written ({error.strerror or error})",
            ) from None
