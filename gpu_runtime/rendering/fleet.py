"""Renders the hosts of a fleet as text and as HTML: one bar for each host. This module is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from gpu_runtime.facts import Device, Snapshot, problems
from gpu_runtime.units import show_bytes

from . import elements, text, views

NOTHING = "No host has joined the fleet. On each host:  gpu fleet join"


def as_text(hosts: Sequence[Snapshot]) -> str:
    """Text with one bar for each of the `hosts`, its models, and its number of waiting requests."""
    if not hosts:
        return NOTHING
    width = max(len(views.clean(one.host)) for one in hosts)
    lines = []
    for one in hosts:
        drawn, legend = text.draw(_bar(one))
        lines.append(
            f"{views.clean(one.host):{width}}  {drawn}  {_fill(one):>19}  "
            f"{views.worst_level(one):8}  {_notes(one)}".rstrip()
        )
        if legend:
            lines.append(f"{'':{width}}  {legend}")
    return "\n".join(lines)


def as_html(hosts: Sequence[Snapshot]) -> str:
    """HTML with one bar for each of the `hosts`, its models, and its number of waiting requests."""
    if not hosts:
        return elements.page(elements.line(elements.with_code(NOTHING)))
    rows = [
        (
            f"<b>{elements.esc(one.host)}</b>",
            elements.bar(_bar(one)),
            elements.esc(_fill(one)),
            f"{elements.pill(views.worst_level(one))} {elements.esc(_notes(one))}",
        )
        for one in hosts
    ]
    return elements.page(elements.devices(rows))


def as_chooser(
    hosts: Sequence[Snapshot], silent: Mapping[str, float], *, chosen: str, tab: str = ""
) -> str:
    """One bar for each of the `hosts`, whose name is a link to its page in the console, on the tab `tab`.

    `silent` maps each host that does not answer to the time, in epoch seconds, since which it has not
    answered; its figures are grey. `chosen` is the host whose page is open.
    """
    rows = []
    for one in hosts:
        query = urlencode({"host": one.host} | ({"tab": tab} if tab else {}))
        here = ' aria-current="page"' if one.host == chosen else ""
        bar, fill, notes = (
            elements.bar(_bar(one)),
            elements.esc(_fill(one)),
            elements.esc(_notes(one)),
        )
        if one.host in silent:
            since = views.clock(silent[one.host])
            bar, fill = (f'<div class="g-old">{part}</div>' for part in (bar, fill))
            notes = f"no answer since {since}"
        elif count := len(problems(one)):
            notes = f"<b>{count} problem{'s' if count != 1 else ''}</b>, {notes}"
        name = f'<a href="?{elements.esc(query)}"{here}>{elements.esc(one.host)}</a>'
        rows.append((name, bar, fill, notes))
    return elements.page(f'<nav class="g-hosts" aria-label="Hosts">{elements.devices(rows)}</nav>')


def _bar(snapshot: Snapshot) -> views.Bar:
    """One bar for all cards of a host. A model on several cards has only one segment in the bar."""
    drawn = [bar for bar in views.bars(snapshot) if not bar.device.is_host]
    merged: dict[tuple[str, str, str], views.BarSegment] = {}
    for bar in drawn:
        for segment in bar.segments:
            key = segment.label, segment.kind, segment.lease
            before = merged.get(key)
            size = segment.bytes + (before.bytes if before else 0)
            merged[key] = segment._replace(bytes=size)
    total = sum(bar.device.total_bytes for bar in drawn)
    limit = sum(bar.limit_bytes for bar in drawn)
    return views.Bar(Device(snapshot.host, total), tuple(merged.values()), limit)


def _fill(snapshot: Snapshot) -> str:
    bar = _bar(snapshot)
    return f"{show_bytes(bar.used_bytes)} of {show_bytes(bar.device.total_bytes)}"


def _notes(snapshot: Snapshot) -> str:
    cards = views.cards(snapshot)
    notes = [f"{len(cards)} card{'s' if len(cards) != 1 else ''}"]
    if snapshot.simulated:
        notes.append("simulated")
    if any(view.drained for view in cards):
        notes.append("drained")
    if waiting := len(snapshot.tickets):
        notes.append(f"{waiting} waiting")
    if snapshot.degraded:
        notes.append(snapshot.degraded)
    return ", ".join(notes)
