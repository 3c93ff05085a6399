"""The tab What if: what using a model, or leasing a size, would do now; nothing is done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import panel as pn
import panel_material_ui as pmui
from msgspec.structs import replace

from gpu_runtime.errors import BadSize, GpuError
from gpu_runtime.facts import (
    HOST,
    DeviceView,
    Drop,
    Lease,
    Load,
    Move,
    Phase,
    Plan,
    Section,
    Share,
    Shares,
    Snapshot,
    Step,
)
from gpu_runtime.rendering import words
from gpu_runtime.rendering.html import esc
from gpu_runtime.rendering.views import clean, lease_name
from gpu_runtime.units import parse_room, show_bytes, show_seconds

from ..charts.bar_chart import BarChart
from ..data import bar_columns, bars
from ..palette import SHARED
from ..widgets.prose import Prose
from .base import Tab
from .now import SELECT

FETCH_SECONDS = 2.0
NO_MODEL = "choose …"
HINT = (
    "Choose a model, or type a size such as <code>14 GiB</code>, to see what would happen: where it would go, who "
    "would step aside and what the devices would look like then. Nothing is done."
)


class Answer(NamedTuple):
    """What came of asking: a plan, or why there is none."""

    plan: Plan | None = None
    error: str = ""


def ask(rt: Any, subject: str, models: Collection[str]) -> Answer:
    """The plan for one of these models, or for a size; or one sentence on why there is none.

    Nothing else is looked at: whoever sees the page must not make the server read files that they name.
    """
    try:
        return Answer(rt.plan(subject if subject in models else parse_room(subject)))
    except BadSize as error:
        return Answer(error=f"{error} Or choose one of the models.")
    except GpuError as error:
        return Answer(error=str(error))


def known(snapshot: Snapshot) -> list[str]:
    """The models that can be planned for, by name: registered here, loadable elsewhere, or held.

    One that several processes have is told apart as they are everywhere: `qwen@4121`.
    """
    owners: dict[str, set[int]] = {spec.name: {snapshot.owner.pid} for spec in snapshot.specs}
    for section in snapshot.sections.values():
        for name in (
            *section.names,
            *(lease.name for lease in section.leases if lease.kind == "model"),
        ):
            owners.setdefault(name, set()).add(section.owner.pid)
    return sorted(
        name if len(pids) == 1 else f"{name}@{pid}" for name, pids in owners.items() for pid in pids
    )


# -- the world after the plan -------------------------------------------------------------------------------------


def after(snapshot: Snapshot, steps: Iterable[Step]) -> Snapshot:
    """The snapshot as if the steps had been done; what would come is shown as on its way."""
    sections = dict(snapshot.sections)
    for step in steps:
        owner_id, _, name = step.lease.partition("/")
        section = sections.get(owner_id) or Section(snapshot.owner)
        lease = section.lease(name) or Lease(owner_id, name)
        others = tuple(one for one in section.leases if one.name != name)
        moved = _done(lease, step)
        sections[owner_id] = replace(section, leases=(*others, moved) if moved else others)
    change = _claims(sections)
    for device, size in _claims(snapshot.sections).items():
        change[device] = change.get(device, 0) - size
    return replace(
        snapshot,
        sections=sections,
        devices=tuple(_changed(view, change.get(view.device.id, 0)) for view in snapshot.devices),
    )


def _done(lease: Lease, step: Step) -> Lease | None:
    if isinstance(step, Drop):
        return None
    if isinstance(step, Move) and all(share.device == HOST for share in step.shares):
        return replace(lease, shares=step.shares, target=(), phase=Phase.SETTLED)
    return replace(lease, shares=(), target=step.shares, phase=Phase.ARRIVING)


def _claims(sections: Mapping[str, Section]) -> dict[str, int]:
    claims: dict[str, int] = {}
    for section in sections.values():
        for lease in section.leases:
            for share in lease.claims():
                claims[share.device] = claims.get(share.device, 0) + share.bytes
    return claims


def _changed(view: DeviceView, more: int) -> DeviceView:
    used = None if view.measured_bytes is None else max(0, view.measured_bytes + more)
    room = None if view.room_bytes is None else view.room_bytes - more
    return replace(
        view, claimed_bytes=view.claimed_bytes + more, measured_bytes=used, room_bytes=room
    )


def touched(steps: Iterable[Step]) -> list[str]:
    """The devices that the steps change."""
    return list(
        dict.fromkeys(
            share.device
            for step in steps
            for share in (*getattr(step, "source", ()), *getattr(step, "shares", ()))
        )
    )


# -- in words -----------------------------------------------------------------------------------------------------


def displaced(plan: Plan, snapshot: Snapshot) -> list[str]:
    """Who would step aside for it, a sentence each."""
    said = []
    for step in plan.steps:
        if isinstance(step, Load) or lease_name(step.lease) == plan.name:
            continue
        said.append(_steps_aside(snapshot, step, step.lease in plan.asked))
    return said


def _steps_aside(snapshot: Snapshot, step: Move | Drop, asked: bool) -> str:
    owner_id, _, name = step.lease.partition("/")
    section = snapshot.sections.get(owner_id)
    lease = section.lease(name) if section else None
    where = places(step.source)
    goes = (
        f"would go from {where} to {places(step.shares)}"
        if isinstance(step, Move)
        else f"would be dropped from {where}"
    )
    back = (
        (lease.restore_seconds if isinstance(step, Move) else lease.reload_seconds)
        if lease
        else 0.0
    )
    return (
        f"{clean(name)} ({show_bytes(total(step.source))}) of {bars.holder(section) if section else 'a process'} "
        f"{goes}{', as its owner is asked to' if asked else ''}"
        f"{f'; it is back {show_seconds(back)} after it is used again' if back >= 0.001 else ''}"
    )


def places(shares: Shares) -> str:
    return " + ".join(share.device for share in shares)


def total(shares: Iterable[Share]) -> int:
    return sum(share.bytes for share in shares)


def answer(told: Answer, snapshot: Snapshot) -> str:
    """The plan in words, as HTML: the verdict, why, and who would step aside."""
    if told.plan is None:
        return f'<div class="alarm">{_lines(told.error)}</div>'
    plan = told.plan
    parts = [
        f'<div class="verdict">{"✓" if plan.granted else "✗"} {esc(words.verdict(plan))}</div>',
        f"<p>{esc(plan.because)}</p>",
    ]
    if plan.obstacle:
        parts.append(f'<div class="alarm">It would not be loaded: {esc(plan.obstacle)}.</div>')
    if gone := displaced(plan, snapshot):
        parts.append(f"<h4>Who would step aside</h4>{_list(gone, 'ul')}")
    elif plan.granted:
        parts.append('<p class="soft">Nobody would step aside.</p>')
    return "".join(parts)


def details(told: Answer, snapshot: Snapshot) -> str:
    """What else there is to a plan, as HTML: the steps, what it needs, and what was considered."""
    parts, plan = [], told.plan
    if plan is None:
        return ""
    if plan.steps:
        said = [words.step_sentence(snapshot, step) for step in plan.steps]
        parts.append(f"<h4>Step by step</h4>{_list(said, 'ol')}")
    if needs := words.needs(plan):
        parts.append(f"<h4>It needs {esc(needs)}{esc(words.on_cards(plan))}</h4>")
    if rows := words.parts(plan):
        parts.append(_table(("part", "size", "from"), rows))
    parts += [f'<p class="soft">{esc(note)}</p>' for note in words.notes(plan)]
    if others := words.others_considered(plan):
        parts.append("<h4>Also considered</h4>" + _table(("place", "why not"), others))
    return "".join(parts)


def _list(sentences: Sequence[str], tag: str) -> str:
    return f"<{tag}>{''.join(f'<li>{esc(one)}</li>' for one in sentences)}</{tag}>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{esc(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{esc(one)}</th>' for one in head)}</tr>{body}</table>"


def _lines(said: str) -> str:
    return "<br>".join(map(esc, said.splitlines()))


# -- the tab ------------------------------------------------------------------------------------------------------


class _Pair:
    """A device now, and as the plan would leave it."""

    def __init__(self) -> None:
        self.head = Prose(margin=(6, 10, 0, 10))
        self.now, self.then = BarChart(), BarChart()
        self.panel = pn.Column(
            self.head,
            *(
                pn.pane.Bokeh(chart.figure, sizing_mode="stretch_width", margin=(0, 6))
                for chart in (self.now, self.then)
            ),
            sizing_mode="stretch_width",
        )


class WhatIf(Tab):
    """A question, the plan, and the devices as it would leave them."""

    title = "What if"

    def __init__(self, watch: Any, actions: Any) -> None:
        super().__init__(watch, actions)
        self._dark = False
        self._pairs: dict[str, _Pair] = {}
        self.model = pmui.Select(
            label="A model",
            options=[NO_MODEL],
            value=NO_MODEL,
            width=300,
            margin=(10, 10),
            **SELECT,
        )
        self.size = pmui.TextInput(
            label="or a size, such as 14 GiB", size="small", width=300, margin=(10, 10)
        )
        self.model.param.watch(
            lambda event: self._asked(self.size, "", event.new != NO_MODEL), "value"
        )
        self.size.param.watch(
            lambda event: self._asked(self.model, NO_MODEL, bool(event.new)), "value"
        )
        self.told, self.details = (
            Prose(f'<div class="hint">{HINT}</div>', margin=(4, 10)),
            Prose(margin=(4, 10)),
        )
        self.bars = pn.Column(sizing_mode="stretch_width")
        self.panel = pn.Column(
            pn.FlexBox(self.model, self.size, sizing_mode="stretch_width"),
            self.told,
            self.bars,
            self.details,
            sizing_mode="stretch_width",
        )

    def dark(self, on: bool) -> None:
        self._dark = on

    def update(self, snapshot: Snapshot) -> None:
        options = [NO_MODEL, *self.watch.once("what if: models", snapshot, known)]
        if self.model.options != options:
            self.model.param.update(
                options=options, value=self.model.value if self.model.value in options else NO_MODEL
            )
        subject = (self.size.value or "").strip() or (
            self.model.value if self.model.value != NO_MODEL else ""
        )
        found = self._plan(subject, options) if subject else None
        said = (
            f'<div class="hint">{HINT}</div>'
            if not subject
            else (
                answer(found, snapshot) if found is not None else '<div class="hint">Asking …</div>'
            )
        )
        more = details(found, snapshot) if found else ""
        self.told.show(said)
        self.details.show(more)
        self._draw(snapshot, found.plan.steps if found and found.plan else ())

    def _plan(self, subject: str, models: list[str]) -> Answer | None:
        return self.watch.latest(
            f"what if: {subject}", lambda rt: ask(rt, subject, models), FETCH_SECONDS
        )

    def _draw(self, snapshot: Snapshot, steps: Sequence[Step]) -> None:
        changed = [
            device
            for device in touched(steps)
            if any(view.device.id == device for view in snapshot.devices)
        ]
        if list(self._pairs) != changed:
            self._pairs = {device: self._pairs.get(device) or _Pair() for device in changed}
            self.bars[:] = [pair.panel for pair in self._pairs.values()]
        if not changed:
            return
        now, then = bars.bars(snapshot), bars.bars(after(snapshot, steps))
        looks = SHARED.looks(bar_columns.labels((*now, *then)))
        for one, other in zip(now, then, strict=True):
            pair = self._pairs.get(one.device.id)
            if pair is None:
                continue
            head = (
                f'<div class="head"><span class="name">{esc(one.device.id)}</span><span class="soft">above now, '
                f"{esc(show_bytes(one.used_bytes))}; below as it would be, {esc(show_bytes(other.used_bytes))}"
                f'</span><span class="unread">{esc(other.told)}</span></div>'
            )
            pair.head.show(head)
            pair.now.show(bar_columns.drawing(one, looks, self._dark))
            pair.then.show(bar_columns.drawing(other, looks, self._dark))

    def _asked(self, other: Any, nothing: str, something: bool) -> None:
        """One of the two is asked about; the other is emptied."""
        if something and other.value != nothing:
            other.value = nothing  # which comes back here, and asks
        elif self.watch.look.snapshot is not None:
            self.update(self.watch.look.snapshot)
