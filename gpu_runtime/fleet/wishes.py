"""The wishes of the fleet: which models, how many copies, and which hosts are drained.

Pure. Wishes are all that the controller stores. Where a model is, the agents answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from ..errors import UnknownModel
from ..facts import Value


class Wish(Value):
    """A model that the fleet should hold."""

    name: str
    body: dict[str, Any]  # its entry, as in the catalogue of one host
    copies: int = 1  # 0: on request only
    dedicated: bool = False  # whether it belongs to the dedicated set


class Wishes(Value):
    """All wishes. The revision is larger by one after each change."""

    revision: int = 0
    models: tuple[Wish, ...] = ()  # sorted by name
    drained: tuple[str, ...] = ()  # names of hosts that take no models

    def find(self, name: str) -> Wish | None:
        """The wish for the model `name`, or None."""
        return next((wish for wish in self.models if wish.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all wished models."""
        return tuple(wish.name for wish in self.models)


def applied(wishes: Wishes, new: Iterable[Wish], *, dedicated: bool) -> Wishes:
    """The wishes with `new` added or changed.

    With `dedicated`, the new wishes replace the dedicated set: dedicated models that are not among
    `new` are no longer wished. If nothing changes, the same wishes are returned.
    """
    kept = {wish.name: wish for wish in wishes.models if not (dedicated and wish.dedicated)}
    kept |= {wish.name: wish for wish in new}
    models = tuple(kept[name] for name in sorted(kept))
    if models == wishes.models:
        return wishes
    return replace(wishes, revision=wishes.revision + 1, models=models)


def without(wishes: Wishes, name: str) -> Wishes:
    """The wishes without the model `name`. Raises UnknownModel."""
    if wishes.find(name) is None:
        raise UnknownModel(name, wishes.names, none="The fleet has no model.")
    models = tuple(wish for wish in wishes.models if wish.name != name)
    return replace(wishes, revision=wishes.revision + 1, models=models)


def with_drain(wishes: Wishes, host: str, *, undo: bool) -> Wishes:
    """The wishes with `host` drained, or open again with `undo`."""
    hosts = {*wishes.drained} - {host} if undo else {*wishes.drained, host}
    drained = tuple(sorted(hosts))
    if drained == wishes.drained:
        return wishes
    return replace(wishes, revision=wishes.revision + 1, drained=drained)


def dump(wishes: Wishes) -> bytes:
    """The `wishes` as JSON."""
    return msgspec.json.encode(wishes)


def load(data: bytes | None) -> Wishes:
    """The wishes in `data`, which `dump` wrote. Without data there are no wishes."""
    return msgspec.json.decode(data, type=Wishes) if data else Wishes()
