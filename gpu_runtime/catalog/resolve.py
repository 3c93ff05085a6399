"""The catalogue as one runtime sees it: its models on this machine's cards.

A catalogue that cannot be read stops only what needs it: what is registered or loaded here goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..errors import BadDocument, CatalogUnavailable, UnknownDevice
from ..facts import Device, ModelSpec
from .store import Catalog

log = logging.getLogger("gpu_runtime")


class Catalogued:
    """Looks models up in a catalogue, for a machine with these devices, as they are called by now."""

    def __init__(self, catalog: Catalog, devices: Callable[[], tuple[Device, ...]]) -> None:
        self.catalog = catalog
        self._devices = devices
        self._told = ""

    @property
    def _cards(self) -> tuple[Device, ...]:
        return tuple(device for device in self._devices() if not device.is_host)

    def spec(self, name: str) -> ModelSpec | None:
        """The model of that name; None where there is none. Raises CatalogUnavailable, BadDocument, UnknownDevice."""
        spec = self.catalog.spec(name)
        return self._here(spec) if spec else None

    def specs(self) -> tuple[ModelSpec, ...]:
        """All models; none, and a line in the log, where the catalogue cannot be read."""
        try:
            return self.catalog.specs()
        except (CatalogUnavailable, BadDocument) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.warning("%s", error)
            return ()

    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs())

    def _here(self, spec: ModelSpec) -> ModelSpec:
        """The spec with its cards by the ids of this machine."""
        placement: dict[str, Any] = dict(spec.placement)
        most = placement.get("card_bytes")
        if isinstance(most, dict):
            placement["card_bytes"] = {self._card(card): size for card, size in most.items()}
        elif most is not None:
            placement["card_bytes"] = {card.id: most for card in self._cards}
        return replace(spec, devices=tuple(map(self._card, spec.devices)), placement=placement)

    def _card(self, said: str) -> str:
        """A card's id, from its index, its id or its UUID. Raises UnknownDevice."""
        for card in self._cards:
            if said in (str(card.index), card.id, card.uuid):
                return card.id
        raise UnknownDevice(said, tuple(card.id for card in self._cards))
