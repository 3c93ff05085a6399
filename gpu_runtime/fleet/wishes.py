"""The wishes of the fleet: models with the number of their copies, slots, and drained hosts. This module is pure."""

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


class Slot(Value):
    """A wished place: a model on named cards of a named host."""

    model: str
    host: str
    devices: tuple[str, ...]

    @property
    def id(self) -> str:
        """The name of the slot, as people type it: `qwen@box2`."""
        return f"{self.model}@{self.host}"


class Wishes(Value):
    """All wishes of the fleet. Each change adds one to the revision."""

    revision: int = 0
    models: tuple[Wish, ...] = ()  # sorted by name
    drained: tuple[str, ...] = ()  # names of hosts that take no models
    slots: tuple[Slot, ...] = ()  # sorted by model and host; at most one for each such pair

    def find(self, name: str) -> Wish | None:
        """The wish for the model `name`, or None."""
        return next((wish for wish in self.models if wish.name == name), None)

    def copies(self, name: str) -> int:
        """The number of copies of the model `name` that are wished."""
        wish = self.find(name)
        return wish.copies if wish else 0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all wished models."""
        return tuple(wish.name for wish in self.models)


def _changed(wishes: Wishes, **fields: Any) -> Wishes:
    """The `wishes` with these `fields` and the next revision; the same wishes if nothing differs."""
    new = replace(wishes, **fields)
    return wishes if new == wishes else replace(new, revision=wishes.revision + 1)


def applied(wishes: Wishes, new: Iterable[Wish], *, dedicated: bool) -> Wishes:
    """The `wishes` with each wish in `new` added, or replacing the earlier wish for the same model.

    With `dedicated`, dedicated models that are not among `new` are no longer wished. If nothing changes, the same
    wishes are returned.
    """
    kept = {wish.name: wish for wish in wishes.models if not (dedicated and wish.dedicated)}
    kept |= {wish.name: wish for wish in new}
    return _only(wishes, tuple(kept[name] for name in sorted(kept)))


def without(wishes: Wishes, name: str) -> Wishes:
    """The wishes without the model `name`. If there is no such model, the result is `wishes`."""
    return _only(wishes, tuple(wish for wish in wishes.models if wish.name != name))


def _only(wishes: Wishes, models: tuple[Wish, ...]) -> Wishes:
    """The `wishes` with these `models`, and the slots of these models."""
    names = {wish.name for wish in models}
    slots = tuple(slot for slot in wishes.slots if slot.model in names)
    return _changed(wishes, models=models, slots=slots)


def with_slot(wishes: Wishes, slot: Slot) -> Wishes:
    """The `wishes` with `slot`, instead of an earlier one of the same model and host. Raises UnknownModel."""
    if wishes.find(slot.model) is None:
        raise UnknownModel(slot.model, wishes.names, none="The fleet has no model.")
    others = tuple(other for other in wishes.slots if other.id != slot.id)
    slots = tuple(sorted((*others, slot), key=lambda wished: (wished.model, wished.host)))
    return _changed(wishes, slots=slots)


def without_slot(wishes: Wishes, id: str) -> Wishes:
    """The `wishes` without the slot `id`. If there is no such slot, the result is `wishes`."""
    return _changed(wishes, slots=tuple(slot for slot in wishes.slots if slot.id != id))


def bodies_on(wishes: Wishes, host: str) -> tuple[dict[str, Any], ...]:
    """The catalogue entries of the models for `host`. A slot there sets the cards of its model's entry."""
    cards = {slot.model: slot.devices for slot in wishes.slots if slot.host == host}
    found = []
    for wish in wishes.models:
        body = wish.body
        if wish.name in cards:
            body = {**body, "spec": {**body["spec"], "gpus": list(cards[wish.name])}}
        found.append(body)
    return tuple(found)


def marks(wishes: Wishes, host: str) -> dict[str, int]:
    """How much each model is wished on `host`, as in `Lease.wished`; without those that are loaded on request only.

    A model that has a slot on the host counts as one of the dedicated set.
    """
    found = {wish.name: 2 if wish.dedicated else 1 for wish in wishes.models if wish.copies}
    return found | {slot.model: 2 for slot in wishes.slots if slot.host == host}


def with_drain(wishes: Wishes, host: str, *, undo: bool) -> Wishes:
    """The `wishes` with `host` drained. With `undo`, the host is open again."""
    hosts = {*wishes.drained} - {host} if undo else {*wishes.drained, host}
    return _changed(wishes, drained=tuple(sorted(hosts)))


def load(data: bytes | None) -> Wishes:
    """The wishes in `data`, as JSON. If `data` is None, there are no wishes."""
    return msgspec.json.decode(data, type=Wishes) if data else Wishes()
