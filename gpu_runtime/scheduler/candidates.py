"""The candidates for a request: cards, and sets of cards. Each shows whether it has the room now.

Pure. The first candidate is the best; the order is that of `placement` and `splitting`. `admission`
decides which candidate gets the request, and `eviction` whether room is made on a card.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from msgspec.structs import replace

from ..facts import Book, Candidate, Lease, Refuse, Request, Share, World, where
from . import quotas
from .capacity import limit_of
from .context import Context, held_bytes
from .drain import refusals as drained_cards
from .feasibility import best_division, hopeless_cards, without_card_bytes
from .obstacles import reserved_for_elders
from .placement import place
from .splitting import may_split, may_use_one_card, split


def laid_out(
    book: Book, request: Request, world: World, lease: Lease | None, out: Mapping[str, str]
) -> tuple[Book, dict[str, Refuse], Request]:
    """The book, the cards that can never hold the request alone, and the request with its layout.

    If the `lease` is in parts and may return to its card, its bytes there are no obstacle. In this
    case they are not in the returned book.
    """
    if lease and lease.in_parts:
        others = without_card_bytes(book, lease)
        never = _never_alone(others, request, world, out)
        decided = _with_layout(request, world, never)
        if held_bytes(book, decided, never):
            return others, never, decided
    never = _never_alone(book, request, world, out)
    return book, never, _with_layout(request, world, never)


def _never_alone(
    book: Book, request: Request, world: World, out: Mapping[str, str]
) -> dict[str, Refuse]:
    """The cards that can never hold the whole request alone, each with the refusal."""
    never = drained_cards(request, world, out)
    never |= quotas.capped_cards(book, request, world)
    never |= hopeless_cards(book, request, world)
    return never


def _with_layout(request: Request, world: World, never: Container[str]) -> Request:
    """The request with its layout `auto` or `whole` decided. Any other layout stays as it is.

    `never` has the cards that can never hold the request alone. The model gets one card if the
    rules allow that, and if at least one allowed card is not in `never`.
    """
    rules = request.placement
    if rules.layout not in ("auto", "whole"):
        return request
    alone = may_use_one_card(rules) and _some_card(rules.devices, world, never)
    if rules.layout == "whole":
        return replace(request, placement=replace(rules, most_cards=1)) if alone else request
    layout = "single" if alone else "proportional"
    return replace(request, placement=replace(rules, layout=layout))


def _some_card(allowed: Container[str], world: World, never: Container[str]) -> bool:
    """Whether any allowed card could ever take the request alone."""
    for card in world.devices:
        if card.is_host or card.id in never:
            continue
        if not allowed or card.id in allowed:
            return True
    return False


def candidates_for(context: Context, out: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The cards, or sets of cards, for the request. Each candidate shows whether it has the room
    now.

    The best candidate is first, and drained cards are last. `out` maps each drained card to a
    sentence on who drained it.
    """
    request, free = context.request, context.free()
    rules = request.placement
    if out:
        free = {device: size for device, size in free.items() if device not in out}
    if rules.layout == "single" and not rules.factor:  # one card; the claim is the footprint
        found = place(request.footprint, free, rules)
    else:
        limits = {device: limit_of(context.book, context.world, device) for device in free}
        found = place(request.footprint, free, rules, limits)
        # `place` adds up the free bytes of several cards. It knows neither which cards are
        # unmeasured nor the owner's own limit. So the divisions over several cards are made again.
        if context.blind or context.own_left is not None:
            found = _splits_within(context, free, limits, found)
    return _with_reserved(found, context) + _drained_candidates(request, out)


def _splits_within(
    context: Context,
    free: Mapping[str, int],
    limits: Mapping[str, int],
    found: tuple[Candidate, ...],
) -> tuple[Candidate, ...]:
    """Returns the single cards among the candidates `found`, and the possible divisions over cards.

    A division uses only measured cards, and stays within the owner's own memory limit. If the best
    single card has room, or the model may not be divided, only single cards are returned.
    """
    rules = context.request.placement
    alone = tuple([candidate for candidate in found if len(candidate.shares) == 1])
    if (alone and alone[0].fits) or not may_split(rules):
        return alone
    measured = {device: size for device, size in free.items() if device not in context.blind}
    several = []
    for candidate in split(context.request.footprint, measured, rules, limits):
        size = sum(share.bytes for share in candidate.shares)
        if context.own_left is None or size <= context.own_left:
            several.append(candidate)
    return tuple(several) + alone


def _drained_candidates(request: Request, out: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The drained cards of `out` that `request` allows, as candidates that do not fit."""
    allowed, size = request.placement.devices, request.footprint.bytes
    found = []
    for device, because in out.items():
        if not allowed or device in allowed:
            found.append(Candidate((Share(device, size),), False, because))
    return tuple(found)


def _with_reserved(candidates: tuple[Candidate, ...], context: Context) -> tuple[Candidate, ...]:
    """The `candidates`. The reasons also name the bytes that are reserved for elders.

    Only the reasons of candidates without room change. An elder is a request ahead in the queue.
    """
    if not context.blocking_elders:
        return candidates
    found = []
    for candidate in candidates:
        reserved = "" if candidate.fits else reserved_for_elders(context, candidate.shares)
        if reserved:
            candidate = replace(candidate, because=f"{candidate.because}; {reserved}")
        found.append(candidate)
    return tuple(found)


def without_hopeless(
    candidates: tuple[Candidate, ...], never: Container[str]
) -> tuple[Candidate, ...]:
    """The candidates, less the single cards that can never hold the request."""
    found = []
    for candidate in candidates:
        if len(candidate.shares) > 1 or candidate.shares[0].device not in never:
            found.append(candidate)
    return tuple(found)


def not_on(cards: Container[str], candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """The candidates that use none of the given `cards`."""
    if not cards:
        return candidates
    found = []
    for candidate in candidates:
        if not any(share.device in cards for share in candidate.shares):
            found.append(candidate)
    return tuple(found)


def waiting_candidates(book: Book, request: Request, world: World) -> tuple[Candidate, ...]:
    """The division over several cards that the request waits for; empty if none can ever fit."""
    found = best_division(book, request, world)
    if isinstance(found, Refuse):
        return ()
    return (replace(found, fits=False, because=f"{where(found.shares)} have too little free"),)
