"""The catalogue for one runtime: its models, with the ids of this machine's cards.

If the catalogue cannot be read, only requests for its models fail. Models that this process has
registered or loaded are not affected.
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
    """The models of a `catalog`, as this machine uses them."""

    def __init__(self, catalog: Catalog, devices: Callable[[], tuple[Device, ...]]) -> None:
        """Reads the `catalog`. `devices` returns the devices of this machine."""
        self.catalog = catalog
        self._devices = devices
        self._logged = ""

    @property
    def _cards(self) -> tuple[Device, ...]:
        return tuple(device for device in self._devices() if not device.is_host)

    def spec(self, name: str) -> ModelSpec | None:
        """The model called `name`, with the device ids of this machine's cards; None if unknown.

        Raises CatalogUnavailable and BadDocument. Raises UnknownDevice if the model names a card
        that this machine does not have.
        """
        spec = self.catalog.spec(name)
        return self._here(spec) if spec else None

    def specs(self) -> tuple[ModelSpec, ...]:
        """All models of the catalogue, with cards as the catalogue's files name them.

        If the catalogue cannot be read, the result is empty, and the error is logged. The same
        error is not logged twice in a row.
        """
        try:
            return self.catalog.specs()
        except (CatalogUnavailable, BadDocument) as error:
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning("%s", error)
            return ()

    def names(self) -> tuple[str, ...]:
        """The names of all models."""
        return tuple(spec.name for spec in self.specs())

    def _here(self, spec: ModelSpec) -> ModelSpec:
        """The `spec`, in which each card is named by its device id.

        If one limit of bytes holds for every card, the result names each card with this limit.
        """
        placement: dict[str, Any] = dict(spec.placement)
        most = placement.get("card_bytes")
        if isinstance(most, dict):
            placement["card_bytes"] = {self._card(card): size for card, size in most.items()}
        elif most is not None:
            placement["card_bytes"] = {card.id: most for card in self._cards}
        return replace(spec, devices=tuple(map(self._card, spec.devices)), placement=placement)

    def _card(self, given: str) -> str:
        """The id of the card that `given` names by its index, id or UUID. Raises UnknownDevice."""
        for card in self._cards:
            if given in (str(card.index), card.id, card.uuid):
                return card.id
        raise UnknownDevice(given, tuple(card.id for card in self._cards))
