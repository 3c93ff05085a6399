"""Makes the request for a model of this process: the wanted lease, and the rules for its cards."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ..facts import Lease, PlacementRules
from .resident import Resident
from .session import Session


def wanted_lease(
    session: Session,
    resident: Resident,
    importance: int | None = None,
    keep_alive: float | None = None,
) -> Lease:
    """The lease to request for a model.

    `importance` and `keep_alive` (seconds) default to the values of the registration.
    """
    spec = resident.spec
    return Lease(
        session.me,
        spec.name,
        importance=spec.importance if importance is None else importance,
        wished=session.wished.get(spec.name, 0),
        keep=spec.keep,
        keep_alive=spec.keep_alive if keep_alive is None else keep_alive,
        movable=resident.backend.can_move,
        recent_uses=resident.recent_uses,
        reload_seconds=resident.lease.reload_seconds,
        restore_seconds=resident.lease.restore_seconds,
        source=resident.content,
        backend=spec.backend,
        model_type=spec.model_type,
        quantization=spec.quantization,
        kind="kernel" if spec.backend == "kernel" else "model",
    )


def placement(session: Session, resident: Resident, for_wish: bool = False) -> PlacementRules:
    """Rules for where the model may be placed and how it may be divided.

    The model's own rules override the settings. If `for_wish` is true, the model is loaded because
    the fleet wishes it, and not for a use. Models that are wished as much stay then.
    """
    splits = resident.backend.can_split and len(resident.pieces()) != 1
    layout = resident.spec.layout if splits else "single"
    if layout == "auto":
        layout = resident.backend.layout  # an engine may require a layout
    devices = allowed_devices(session, resident)
    rules = replace(session.settings.placement(), devices=devices, layout=layout)
    rules = replace(rules, **resident.spec.placement)
    if for_wish:
        rules = replace(rules, spared=session.wished.get(resident.spec.name, 0))
    return _bound_to(resident.must_return_to(), rules)


def _bound_to(cards: Mapping[str, int], rules: PlacementRules) -> PlacementRules:
    """Returns the `rules`, changed to take from each card exactly the bytes in `cards`.

    `cards` maps ids of cards to bytes. Memory that left several cards for host memory returns to
    each card with the bytes that it had there. With less than two cards, or with unknown bytes, the
    rules are unchanged.
    """
    if len(cards) < 2 or not all(cards.values()):
        return rules
    return replace(
        rules,
        layout="proportional",
        card_bytes=dict(cards),
        least_cards=len(cards),
        most_cards=len(cards),
        margin_bytes=0,
    )


def allowed_devices(session: Session, resident: Resident) -> tuple[str, ...]:
    """Ids of the cards on which the model may be placed. Empty means any card.

    The model's own list overrides the card that INFERENCE_GPU_INDEX names. Memory that a live
    autograd graph holds returns only to the card that it left.
    """
    if bound := resident.must_return_to():
        return tuple(bound)
    index = session.settings.inference_gpu_index
    if resident.spec.devices or index is None:
        return resident.spec.devices
    cards = [device for device in session.probe.devices if not device.is_host]
    return tuple(card.id for card in cards if card.index == index)
