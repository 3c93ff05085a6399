"""The contents of the tab What if: a description of a plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_runtime.facts import (
    Drop,
    Lease,
    Move,
    Plan,
    PlanLevel,
    Shed,
    Snapshot,
)
from gpu_runtime.rendering import answers, views
from gpu_runtime.rendering.html import esc
from gpu_runtime.safe_text import clean
from gpu_runtime.units import counted, show_bytes, show_seconds

from .cells import process_in_words


class PlanAnswer(NamedTuple):
    """A plan, or the error that explains why there is no plan."""

    plan: Plan | None = None
    error: str = ""


def model_choices(snapshot: Snapshot) -> list[str]:
    """The models for which a plan can be made: registered, loadable or leased; `qwen@4121` if several have it."""
    pids: dict[str, set[int]] = {spec.name: {snapshot.owner.pid} for spec in snapshot.specs}
    for id, section in snapshot.sections.items():
        held = [lease.name for lease in section.leases if lease.kind == "model"]
        for name in (*snapshot.names.get(id, ()), *held):
            pids.setdefault(name, set()).add(section.owner.pid)
    choices = []
    for name, owners in pids.items():
        choices += [name] if len(owners) == 1 else [f"{name}@{pid}" for pid in owners]
    return sorted(choices)


# -- in words --------------------------------------------------------------------------------------


def evicted(plan: Plan, snapshot: Snapshot) -> list[str]:
    """A sentence for each model of `snapshot` that `plan` evicts, or moves from RAM to a disk."""
    sentences = [
        _eviction_words(snapshot, step, step.lease in plan.asked)
        for step in plan.steps
        if isinstance(step, Shed) or (isinstance(step, (Move, Drop)) and step.lease in plan.victims)
    ]
    return [sentence for sentence in sentences if sentence]


def _eviction_words(snapshot: Snapshot, step: Move | Drop | Shed, is_asked: bool) -> str:
    owner_id, _, name = step.lease.partition("/")
    section = snapshot.sections.get(owner_id)
    lease = section.lease(name) if section else None
    if isinstance(step, Shed) and (lease is None or lease.shadow_bytes):
        return ""  # a copy in RAM
    process = process_in_words(section) if section else "a process"
    source = views.places(step.source)
    if isinstance(step, Move):
        moves = f"would move from {source} to {views.places(step.shares)}"
    elif isinstance(step, Shed):
        moves = "would move from RAM to its disk"
    else:
        moves = f"would be unloaded from {source}"
    asked = "; its process is asked to do it" if is_asked else ""
    size = show_bytes(sum(share.bytes for share in step.source))
    if lease and isinstance(step, Move) and lease.after(step.shares) != step.shares:
        size = f"{size} of {show_bytes(lease.bytes)}"
    return f"{clean(name)} ({size}), held by {process}, {moves}{asked}{_return_words(lease, step)}"


def _return_words(lease: Lease | None, step: Move | Drop | Shed) -> str:
    """How long an evicted model takes to return, as the end of a sentence; empty if it is unknown."""
    if lease is None:
        return ""
    does, seconds = "loading it again", lease.reload_seconds
    if isinstance(step, Move):
        does, seconds = "restoring it again", lease.restore_seconds
    elif isinstance(step, Shed):
        does, seconds = "reading it back", lease.disk_seconds
    return f"; {does} takes {show_seconds(seconds)}" if seconds >= 0.001 else ""


def answer(found: PlanAnswer, snapshot: Snapshot) -> str:
    """The verdict as HTML: whether the plan in `found` fits, the reason, and the models that it evicts."""
    plan = found.plan
    if plan is None:
        return f'<div class="alarm">{_lines(found.error)}</div>'
    parts = [f'<div class="verdict">{esc(verdict(plan))}</div>', f"<p>{esc(plan.because)}</p>"]
    if plan.obstacle:
        parts.append(f'<div class="alarm">It would not be loaded: {esc(plan.obstacle)}.</div>')
    sentences = evicted(plan, snapshot)
    if sentences:
        parts.append(f"<h4>Would be evicted</h4>{_list(sentences, 'ul')}")
    elif plan.granted:
        parts.append('<p class="soft">No model would be evicted.</p>')
    return "".join(parts)


def verdict(plan: Plan) -> str:
    """One line that states when the model of `plan` fits: now, after evictions, after a wait, or never."""
    leaving = len(plan.victims)
    if plan.level is PlanLevel.NEVER:
        answer = "✗ Never, as things are"
    elif not plan.granted:
        answer = "◷ It waits"
    elif leaving:
        answer = f"✓ After {counted(leaving, 'model')} left"
    else:
        answer = "✓ Now"
    return f"{answer} · {views.verdict(plan)}"


def preload_target(subject: str, snapshot: Snapshot) -> str:
    """The target of the button Preload, `OWNER_ID/MODEL`. `subject` is one of the `model_choices`."""
    bare, _, pid = subject.rpartition("@")
    name = bare if bare and pid.isdigit() else subject
    for id, section in snapshot.sections.items():
        has_it = section.lease(name) or name in snapshot.names.get(id, ())
        if has_it and (name == subject or str(section.owner.pid) == pid):
            return f"{id}/{name}"
    return f"/{name}"


def host_choices(snapshot: Snapshot) -> tuple[int, int, int]:
    """The sizes for a replay, in bytes: the largest card, the present host memory for models, and twice this memory."""
    cards = [view.limit_bytes for view in snapshot.cards]
    host = sum(view.limit_bytes for view in snapshot.devices if view.device.is_host)
    return max(cards, default=0), host, 2 * host


def ram_sentence(rows: Sequence[Mapping[str, Any]], days: float) -> str:
    """What more host memory would have changed in the last `days`, from `rt.backtest` for two sizes."""
    of_ours = [row for row in rows if row["engine"] == "full"]
    now = min(of_ours, key=lambda row: row["host_bytes"])
    more = max(of_ours, key=lambda row: row["host_bytes"])
    size, was = show_bytes(int(more["host_bytes"])), show_bytes(int(now["host_bytes"]))
    requests, waited = int(now["requests"]), float(now["wait_s"])
    if not requests or waited <= 0:
        return f"Nobody waited in the last {days:g} days, in a replay of {requests} requests."
    less = round(100 * (1 - float(more["wait_s"]) / waited))
    change = f"{less} % less" if less > 0 else "the same"
    return (
        f"With {size} of RAM for models instead of {was}, the waiting of the last {days:g} days "
        f"would have been {change} (a replay of {requests} requests on one card)."
    )


def details(found: PlanAnswer, snapshot: Snapshot) -> str:
    """The details of the plan as HTML: its steps, its needs, and the other places that were considered."""
    plan = found.plan
    if plan is None:
        return ""
    steps = answers.NOTHING
    if plan.steps:
        steps = answers.numbered(views.step_sentence(snapshot, step) for step in plan.steps)
    title = "<h4>Step by step</h4>" if plan.steps else ""
    return title + answers.page(steps, *answers.plan_details(plan, snapshot)).html


def _list(sentences: Sequence[str], tag: str) -> str:
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences)
    return f"<{tag}>{items}</{tag}>"


def _lines(text: str) -> str:
    return "<br>".join(esc(line) for line in text.splitlines())
