"""Tries the hosts in the order of their offers, until one of the hosts serves the model.

This module does not know Ray. `attempt` is the call that a host answers or refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from ..errors import Busy, Deadlock, DoesNotFit, LoadFailed, NotAllowed, OutOfMemory, UnknownModel
from ..facts import Offer, PlanLevel
from .cluster import Gone, Unreachable

log = logging.getLogger("gpu_runtime")
T = TypeVar("T")

_PASSING = (Busy, Deadlock, OutOfMemory)  # a later attempt may succeed
# After such an error, the next host is tried.
NEXT_HOST = (*_PASSING, DoesNotFit, NotAllowed, LoadFailed, UnknownModel)


class FleetAnswer(NamedTuple):
    """The host that served a model, and its answer. The host is empty if no host served the model."""

    host: str
    answer: object
    reasons: dict[str, str]  # host -> why it did not serve the model
    gone: tuple[str, ...]  # hosts that died or did not answer meanwhile
    errors: tuple[Exception, ...] = ()  # if no host served the model, the errors of those tried


def attempts(name: str, offers: Iterable[Offer], attempt: Callable[[Offer], T]) -> FleetAnswer:
    """Calls `attempt` with one offer after the other, until one call of `attempt` succeeds.

    If a host has become busy since its offer, the next one is tried. Offers of the level `never` are not tried.
    """
    listed = list(offers)
    able = [offer for offer in listed if offer.level is not PlanLevel.NEVER]
    reasons = {offer.host: offer.because for offer in listed if offer.level is PlanLevel.NEVER}
    gone: list[str] = []
    errors: list[Exception] = []
    for number, offer in enumerate(able, start=1):
        log.info("%s: attempt %d/%d on %s (%s)", name, number, len(able), offer.host, offer.level)
        try:
            return FleetAnswer(offer.host, attempt(offer), reasons, tuple(gone))
        except NEXT_HOST as error:
            reasons[offer.host] = str(error).partition("\n")[0]
            errors.append(error)
        except (Gone, Unreachable) as error:
            reasons[offer.host] = f"it does not answer ({error})"
            gone.append(offer.host)
    return FleetAnswer("", None, reasons, tuple(gone), tuple(errors))


def refusal(name: str, offers: Iterable[Offer], served: FleetAnswer, waited: float) -> Exception:
    """The error for a model that no host served, after `waited` seconds. It names every host with its reason.

    It is Busy if a later attempt may succeed, or if a host has not answered. Else it is LoadFailed if a host had room
    and could not load the model, else DoesNotFit.
    """
    listed, reasons = list(offers), served.reasons
    each = "\n".join(f"  {host}: {reason}" for host, reason in sorted(reasons.items()))
    if not reasons:
        return DoesNotFit(
            f"{name} has no host: the fleet has none that takes models.\n"
            "  On each host:  gpu fleet join",
            **_facts(name, listed),
        )
    errors = served.errors
    answered = all(offer.answered for offer in listed)
    none_offers = all(offer.level is PlanLevel.NEVER for offer in listed)
    is_final = bool(errors) and not served.gone and not any(isinstance(e, _PASSING) for e in errors)
    if answered and (none_offers or is_final):
        if is_final and any(isinstance(error, LoadFailed) for error in errors):
            text = f"{name} was loaded by no host of the fleet.\n{each}"
            return LoadFailed(text, name=name, source="")
        return DoesNotFit(f"{name} fits on no host of the fleet.\n{each}", **_facts(name, listed))
    return Busy(
        f"{name} was not served by any host within {waited:.0f} s.\n{each}",
        name=name,
        waited_seconds=waited,
        because=each,
        hosts=dict(reasons),
    )


def _facts(name: str, offers: list[Offer]) -> dict[str, object]:
    return {
        "name": name,
        "need_bytes": max((offer.need_bytes for offer in offers), default=0),
        "budget_bytes": 0,
        "device": "",
        "holders": (),
        "considered": (),
        "hosts": {offer.host: offer.because for offer in offers},
    }
