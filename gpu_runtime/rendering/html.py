"""Renders facts as HTML pages: a snapshot, a plan, and the other answers. This module is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_runtime.facts import Applied, Event, Health, Outcome, Plan, Replayed, Snapshot
from gpu_runtime.units import show_bytes

from . import text, views
from .elements import (
    bar,
    code,
    devices,
    esc,
    line,
    page,
    pill,
    pre,
    simulated,
    swatch,
    table,
    table_cell,
    td,
    with_code,
)
from .views import clock

LONGEST_SHOWN = 30  # characters of a name in the table of holders

# -- status --------------------------------------------------------------------------------------


def status(snapshot: Snapshot) -> str:
    """The `snapshot` as a page, which shows the devices, the queue, the holders and the last decision."""
    users = len(views.owners(snapshot))
    shared = f'<span class="g-soft">shared by {users} processes</span>' if users > 1 else ""
    head = (
        f'<div class="g-head"><b>{esc(views.device_title(snapshot))}</b> '
        f"{simulated(snapshot)} {shared}</div>"
    )
    alarms = "".join(f'<div class="g-alarm">{esc(alarm)}</div>' for alarm in views.alarms(snapshot))
    return page(
        head, alarms, _devices(snapshot), _queue(snapshot), _holders(snapshot), _past(snapshot)
    )


def host(snapshot: Snapshot) -> str:
    """The `snapshot` of one of several hosts as a page, under the host's name."""
    return page(line(f"<b>{esc(views.host_title(snapshot))}</b>")) + status(snapshot)


def _devices(snapshot: Snapshot) -> str:
    rows = []
    for view, drawn in zip(snapshot.devices, views.bars(snapshot), strict=True):
        fill = f'{esc(views.fill(view))} <span class="g-soft">{view.pressure:.0%}</span>'
        remarks = esc(", ".join(views.remarks(snapshot, view)))
        rows.append((f"<b>{esc(view.device.id)}</b>", bar(drawn), fill, remarks))
    return devices(rows)


def _holders(snapshot: Snapshot) -> str:
    rows = views.holdings(snapshot)
    hint = ""
    if not any(row.kind in ("model", "block", "kernel", "stays") for row in rows):
        hint = line(with_code(text.nothing_yet("%gpu", [spec.name for spec in snapshot.specs])))
    if not rows:
        return hint
    headers = ("model", "size", "where", "held by", "importance", "state")
    shown = table(headers, map(_holding, rows[: views.MOST_ROWS]))
    more = len(rows) - views.MOST_ROWS
    rest = line(f"and {more} more:", code("%gpu leases"), soft=True) if more > 0 else ""
    return hint + shown + rest


def _holding(row: views.Holding) -> tuple[str, ...]:
    in_use = "g-in-use" if row.state.startswith("in use") else ""
    state = td(row.state, in_use)
    if row.kind == "stays":  # a reason, which is long
        state = table_cell("td", esc(row.state), "g-wrap", "min-width:150px")
    marks = " ".join(f'<span class="g-mark">{esc(mark)}</span>' for mark in row.marks)
    name = esc(row.name)
    if len(row.name) > LONGEST_SHOWN:  # the end of a longer name is hidden
        name = f'<span title="{name}">{name}</span>'
    name = swatch(row) + name
    return (
        table_cell("td", name, "g-name"),
        td(text.size(row.bytes), "g-num"),
        td(row.where),
        td(row.holder, "g-wrap"),
        table_cell("td", marks),
        state,
    )


def _queue(snapshot: Snapshot) -> str:
    queue = views.waiting(snapshot)
    if not queue:
        return ""
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in queue)
    head = f"<b>Waiting: {len(queue)}</b>"
    return f'<div class="g-wait">{head}<ol class="g-list">{items}</ol></div>'


def _past(snapshot: Snapshot) -> str:
    parts = []
    if snapshot.events:
        event = snapshot.events[-1]
        parts.append(
            line(
                f'<span class="g-soft">Last decision, {clock(event.wall)}:</span>',
                f"<b>{esc(views.event_subject(event, snapshot))}</b>",
                esc(views.event_sentence(event)),
            )
        )
    if any(snapshot.totals.values()):
        parts.append(line(esc(views.counters(snapshot)), soft=True))
    return "".join(parts)


# -- answers -------------------------------------------------------------------------------------


def health(found: Health) -> str:
    """The health `found`, as one line."""
    fullest = f'<span class="g-soft">{esc(found.fullest)}</span>'
    state = "healthy" if found.healthy else "not healthy"
    return page(line(pill(found.pressure), f"<b>{state}</b>", fullest, esc(found.message)))


def outcome(done: Outcome) -> str:
    """The outcome `done` of a verb, as one line."""
    head, _, detail = text.outcome(done).partition(": ")
    return page(line(f"<b>{'✓' if done.done else '✗'} {esc(head)}</b>", esc(detail)))


def applied(done: Applied) -> str:
    """The result `done` of applying a file of models, with its notes."""
    head, _, detail = text.applied_head(done).partition(": ")
    notes = "".join(f"<li>{esc(note)}</li>" for note in done.notes)
    return page(
        line(f"<b>✓ {esc(head)}</b>", esc(detail)),
        f'<ul class="g-list">{notes}</ul>' if notes else "",
    )


def plan(found: Plan, snapshot: Snapshot) -> str:
    """The plan `found` for `snapshot`: its verdict, reason and steps, and the devices after them."""
    mark = "✓" if found.granted else "✗"
    head = (
        f'<div class="g-head"><b>{mark} {esc(views.verdict(found))}</b> {simulated(snapshot)}</div>'
    )
    done = ""
    if found.steps or found.obstacle:
        command = with_code(views.how_to_do_it(found, "%gpu"))
        done = line("Nothing was done.", command, soft=True)
    return page(
        head,
        line(esc(found.because)),
        _plan_needs(found),
        _plan_steps(found, snapshot),
        _plan_alternatives(found),
        done,
    )


def _plan_needs(found: Plan) -> str:
    parts = []
    needs = views.needs(found)
    if needs:
        parts.append(line(f"Needs {esc(needs)}{esc(views.on_cards(found))}", soft=True))
    rows = [
        (td(part), td(size, "g-num"), td(source, "g-soft g-wrap"))
        for part, size, source in views.parts(found)
    ]
    if rows:
        parts.append(table(("part", "size", "from"), rows))
    parts += [line(with_code(note), soft=True) for note in views.notes(found)]
    return "".join(parts)


def _plan_steps(found: Plan, snapshot: Snapshot) -> str:
    parts = []
    if found.steps:
        sentences = [views.step_sentence(snapshot, step) for step in found.steps]
        items = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences)
        parts.append(f'<ol class="g-list">{items}</ol>')
    after = views.bars_after(snapshot, found.steps)
    if after:
        rows = [
            (f"<b>{esc(one.device.id)}</b>", bar(one), esc(show_bytes(one.used_bytes)), "")
            for one in after
        ]
        parts.append(line("Then:", soft=True) + devices(rows))
    return "".join(parts)


def _plan_alternatives(found: Plan) -> str:
    others = views.others_considered(found)
    if not others:
        return ""
    headers = ("also considered" if found.granted else "considered", "why not")
    return table(headers, [(td(place), td(because, "g-wrap")) for place, because in others])


def why(name: str, events: Sequence[Event], around: Snapshot | None = None) -> str:
    """The `events` about the model `name` as a table of sentences, the newest first; see `text.why`."""
    if not events:
        return page(line(with_code(text.why(name, events))))
    rows = table(("when", f"why {name}".rstrip()), map(_event_row, views.titled(events, around)))
    return page(rows, "" if name else line(with_code(text.why_hint(events))))


def replays(found: Sequence[Replayed]) -> str:
    """The recorded decisions, and whether the scheduler decides the same now."""
    return page(table(("when", "number", "decision", "decided again"), map(_replay_row, found)))


def _replay_row(one: Replayed) -> tuple[str, ...]:
    sentence = f"<b>{esc(one.model)}</b> {esc(one.decided)}"
    return (
        td(clock(one.wall), "g-soft"),
        td(str(one.id), "g-soft"),
        table_cell("td", sentence),
        td(one.result.removeprefix("Decided again: ")),
    )


def _event_row(titled: tuple[str, Event]) -> tuple[str, str]:
    title, event = titled
    sentence = f"<b>{esc(title)}</b> {esc(views.event_sentence(event))}"
    return td(clock(event.wall), "g-soft"), table_cell("td", sentence, "g-wrap")


def config(rows: Sequence[Any]) -> str:
    """The settings in `rows` as a table."""
    return page(table(("setting", "value", "set by", "meaning"), map(_setting_row, rows)))


def _setting_row(row: Any) -> tuple[str, ...]:
    return (
        table_cell("td", code(row.name)),
        td(row.value),
        td("" if row.source == "default" else row.source, "g-wrap"),
        td(row.doc, "g-soft g-wrap"),
    )


def preset(settings: Mapping[str, str]) -> str:
    """The `settings` as lines for a shell."""
    return page(pre(text.preset(settings)))
