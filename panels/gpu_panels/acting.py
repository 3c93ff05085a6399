"""Carries out a confirmed action. The console and JupyterLab's panel use this module. Panel is not imported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from gpu_runtime.errors import GpuError
from gpu_runtime.facts import THIS_PROCESS, LeaseId, Outcome, Snapshot
from gpu_runtime.units import show_bytes

from .data.confirmations import ON_CARDS, Proposal, changed, idle_leases
from .data.members import refusal

log = logging.getLogger("gpu_runtime")

ANSWER_SECONDS = 30.0  # the longest wait for an owner's answer


def attempt(rt: Any, proposal: Proposal, name: str, member: str = "") -> tuple[str, str]:
    """Carries out `proposal`, unless something has changed since the click. Returns `done` or `failed`, and a sentence.

    The journal records `name` as the person who acts. A `member` may act on own processes only. The call waits for the
    model's process, so call it in a thread.
    """
    try:
        snapshot = rt.status()
        refused = refusal(proposal, snapshot, member) if member else ""
        if why_not := refused or changed(proposal, snapshot):
            return "failed", why_not
        outcome = perform(rt, proposal, name)
        return ("done" if outcome.done else "failed"), outcome.because
    except GpuError as error:
        return "failed", str(error)
    except Exception as error:
        log.exception("%s %s", proposal.verb, proposal.title)
        return "failed", f"{type(error).__name__}: {error}"


def perform(rt: Any, proposal: Proposal, name: str) -> Outcome:
    """Carries out `proposal` for the person `name`. Returns or raises what the runtime's method does."""
    with rt.on_behalf_of(name):
        special = _SPECIAL.get(proposal.verb)
        if special is not None:
            return special(rt, proposal)
        # A kernel's lease is evicted and preloaded like a model's. `rt.park` is not called, because it waits
        # without limit.
        act = getattr(rt, {"park": "evict", "unpark": "preload"}.get(proposal.verb, proposal.verb))
        if proposal.verb in ("pin", "unpin"):
            return act(proposal.subject)
        return act(proposal.subject, timeout=ANSWER_SECONDS)


def _evict_idle(rt: Any, proposal: Proposal) -> Outcome:
    leases, failed, freed = idle_leases(rt.status(), proposal.name), [], 0
    for lease in leases:
        try:
            freed += rt.evict(LeaseId(lease.owner, lease.name), timeout=ANSWER_SECONDS).bytes
        except GpuError as error:
            failed.append(str(error))
    left = f"{len(leases) - len(failed)} of {len(leases)} left; {show_bytes(freed)} came free"
    return Outcome("evict", proposal.name, not failed, ". ".join([left, *failed]), freed)


def _unpin_evict(rt: Any, proposal: Proposal) -> Outcome:
    rt.unpin(proposal.subject)
    try:
        outcome = rt.evict(proposal.subject, timeout=ANSWER_SECONDS)
    except GpuError as error:
        outcome = Outcome("evict", proposal.name, False, str(error))
    if outcome.done:
        return outcome
    return replace(outcome, because=f"It is no longer pinned. {outcome.because}")


_SPECIAL: dict[str, Callable[[Any, Proposal], Outcome]] = {
    "defrag": lambda rt, proposal: rt.defrag(proposal.owner, timeout=ANSWER_SECONDS),
    "resume": lambda rt, proposal: rt.resume(proposal.owner),
    "interrupt": lambda rt, proposal: rt.interrupt(proposal.owner),
    "compact": lambda rt, proposal: rt.defrag(timeout=ANSWER_SECONDS),
    "drain": lambda rt, proposal: rt.drain(proposal.name, timeout=ANSWER_SECONDS),
    "undrain": lambda rt, proposal: rt.drain(proposal.name, undo=True),
    "evict_idle": _evict_idle,
    "drop": lambda rt, proposal: rt.evict(proposal.subject, drop=True, timeout=ANSWER_SECONDS),
    "unpin_evict": _unpin_evict,
    "move": lambda rt, proposal: rt.move(proposal.subject, proposal.device, timeout=ANSWER_SECONDS),
}


def asked_process(proposal: Proposal, snapshot: Snapshot | None) -> str:
    """The name of the process whose answer the `proposal` needs, as in `snapshot`."""
    if proposal.verb in ON_CARDS:
        return "the processes concerned"
    section = snapshot.sections.get(proposal.owner) if snapshot else None
    return section.owner.label if section else THIS_PROCESS
