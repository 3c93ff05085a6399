"""Carries out a confirmed action. The console and JupyterLab's panel use it; Panel is not imported."""

from __future__ import annotations

import logging
from typing import Any

from gpu_runtime.errors import GpuError
from gpu_runtime.facts import THIS_PROCESS, Outcome, Snapshot

from .data.confirmations import Proposal, changed

log = logging.getLogger("gpu_runtime")

ANSWER_SECONDS = 30.0  # the longest wait for an owner's answer


def attempt(rt: Any, proposal: Proposal, name: str) -> tuple[str, str]:
    """Checks with the runtime `rt` that nothing has changed, and carries out `proposal`.

    `name` is written into the journal. Returns `done` or `failed`, and a sentence. It waits for the
    answer of the model's process, so it belongs in a thread.
    """
    try:
        difference = changed(proposal, rt.status())
        if difference:
            return "failed", difference
        outcome = perform(rt, proposal, name)
        return ("done" if outcome.done else "failed"), outcome.because
    except GpuError as error:
        return "failed", str(error)
    except Exception as error:
        log.exception("%s %s", proposal.verb, proposal.title)
        return "failed", f"{type(error).__name__}: {error}"


def perform(rt: Any, proposal: Proposal, name: str) -> Outcome:
    """Carries out `proposal` with the runtime `rt` for `name`. Returns the outcome.

    Raises the errors of the runtime's method.
    """
    with rt.on_behalf_of(name):
        if proposal.verb == "defrag":
            return rt.defrag(proposal.owner, timeout=ANSWER_SECONDS)
        # A kernel's lease is evicted and preloaded like a model's. `rt.park` would wait without limit.
        act = getattr(rt, {"park": "evict", "unpark": "preload"}.get(proposal.verb, proposal.verb))
        if proposal.verb in ("pin", "unpin"):
            return act(proposal.subject)
        return act(proposal.subject, timeout=ANSWER_SECONDS)


def asked_process(proposal: Proposal, snapshot: Snapshot | None) -> str:
    """The name in `snapshot` of the process that the `proposal` waits for."""
    section = snapshot.sections.get(proposal.owner) if snapshot else None
    return section.owner.label if section else THIS_PROCESS
