"""Makes a recorded decision again. Pure: the record has everything that the scheduler reads."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ..facts import (
    Book,
    Decided,
    Grant,
    Replayed,
    Request,
    Section,
    Step,
    Verdict,
    Wait,
    World,
    where,
)
from ..facts.answers import verdict_kind
from ..units import show_bytes
from .admission import admit
from .eviction_policy import policy


def is_new(book: Book, after: Book, request: Request, verdict: Verdict) -> bool:
    """Whether `verdict` differs from the earlier verdict on `request` and should be recorded.

    `book` is the book before the decision, and `after` the book after the decision. A request that
    waits is decided again whenever the book changes, mostly with the same result. A block of code
    that gets free memory at once is not recorded: programs may lease often, and nothing was decided.
    """
    is_block = request.lease.kind == "block"
    if is_block and isinstance(verdict, Grant) and book.ticket(request.key) is None:
        return False
    if after.seq > book.seq:  # a new event: the request was granted or refused, or begins to wait
        return True
    if not isinstance(verdict, Wait):
        return False
    if any(after.find(step.lease) is not book.find(step.lease) for step in verdict.steps):
        return True
    asked = (verdict.asked, verdict.shadows)
    ticket = book.ticket(request.key)
    return any(asked) and (ticket is None or (ticket.recalls, ticket.shadows) != asked)


def recorded(
    book: Book, request: Request, world: World, verdict: Verdict, rule: str, version: str
) -> Decided:
    """The record of a decision. Fields that no decision reads are left out.

    `rule` is the name of the eviction policy.
    """
    sections = {id: _bare(section) for id, section in book.sections.items()}
    bare = replace(book, sections=sections, events=(), counts={})
    plain = replace(verdict, considered=())
    return Decided(0, world.wall, version, rule, bare, request, world, plain)


def _bare(section: Section) -> Section:
    return replace(section, counts={}) if section.counts else section


def replayed(decided: Decided, version: str) -> Replayed:
    """Makes the decision `decided` again. `version` is the version of the running scheduler."""
    book, request, world = decided.book, decided.request, decided.world
    _, verdict = admit(book, request, world, policy(decided.policy))
    verdict = replace(verdict, considered=())
    then, now = _parts(decided.verdict), _parts(verdict)
    return Replayed(
        decided.id,
        decided.wall,
        decided.model,
        _sentence(decided.verdict),
        _sentence(verdict),
        verdict == decided.verdict,
        tuple(_differences(then, now)) if verdict != decided.verdict else (),
        decided.version if decided.version != version else "",
    )


def _sentence(verdict: Verdict) -> str:
    because = verdict.because.rstrip(".")
    return f"{verdict_kind(verdict)}: {because}."


def _parts(verdict: Verdict) -> dict[str, str]:
    """The parts of `verdict` that determine what happens, as texts by name."""
    parts = {"verdict": verdict_kind(verdict)}
    parts["steps"] = ", ".join(_step(step) for step in getattr(verdict, "steps", ()))
    if isinstance(verdict, Wait):
        parts["recalled leases"] = ", ".join((*verdict.asked, *verdict.shadows))
    return parts


def _step(step: Step) -> str:
    shares = getattr(step, "shares", None) or step.source  # type: ignore[union-attr]
    size = show_bytes(sum(share.bytes for share in shares))
    verb = type(step).__name__.lower()
    return f"{verb} {step.lease.partition('/')[2]} ({size}, {where(shares)})"


def _differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    found = []
    for part in dict.fromkeys((*then, *now)):
        old, new = then.get(part, ""), now.get(part, "")
        if old != new:
            found.append(f"The {part}: {old or 'none'} then, {new or 'none'} now.")
    return found or ["Only the wording or the figures differ."]
