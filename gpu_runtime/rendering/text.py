"""Facts as aligned text, for a terminal and for whoever reads a notebook as a file. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpu_runtime.facts import Applied, Event, Health, Outcome, Plan, Snapshot
from gpu_runtime.units import show_bytes, show_seconds

from . import views, words
from .views import Bar, clean, clock

BAR_CELLS = 32
_LEASES = "█▓"  # neighbours alternate, so that the eye can part them
_MARKS = {"arriving": "▒", "leaving": "▒", "residue": "░", "strangers": "░"}
_FREE, _LIMIT = "·", "│"
LONGEST = 44  # characters of a cell; the middle of longer ones is left out


def status(snapshot: Snapshot, prompt: str = "%gpu") -> str:
    """Everything at a glance: devices, who holds what, who waits, the last decision."""
    sections = [
        [
            f"{views.device_title(snapshot)} · pressure {views.worst_level(snapshot)}",
            *words.alarms(snapshot),
        ],
        list(_devices(snapshot)),
        _who(snapshot, prompt),
        _queue(snapshot),
        _past(snapshot),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def host(snapshot: Snapshot, prompt: str = "%gpu") -> str:
    """The same for one host of several, under its name."""
    return f"── {words.host(snapshot)} ──\n{status(snapshot, prompt)}"


def _devices(snapshot: Snapshot) -> Iterable[str]:
    width = max((len(view_.device.id) for view_ in snapshot.devices), default=0)
    fills = max((len(views.fill(view_)) for view_ in snapshot.devices), default=0)
    for view_, bar in zip(snapshot.devices, views.bars(snapshot), strict=True):
        drawn, legend = draw(bar)
        remarks = ", ".join(views.remarks(snapshot, view_))
        yield (
            f"{view_.device.id:{width}}  {drawn}  {views.fill(view_):>{fills}}  {view_.pressure:>5.0%}  "
            f"{view_.level:8}  {remarks}"
        ).rstrip()
        if legend:
            yield f"{'':{width}}  {legend}"


def _who(snapshot: Snapshot, prompt: str) -> list[str]:
    rows = views.holdings(snapshot)
    if not any(row.kind in ("model", "block") for row in rows):
        hint = nothing_yet(prompt, registered=[spec.name for spec in snapshot.specs])
        return [hint, *table(_cells(rows), _WHO, right=(1,))] if rows else [hint]
    lines = table(_cells(rows[: views.MOST_ROWS]), _WHO, right=(1,))
    if len(rows) > views.MOST_ROWS:
        lines.append(f"and {len(rows) - views.MOST_ROWS} more:  {prompt} leases")
    return lines


_WHO = (
    "MODEL",
    "SIZE",
    "WHERE",
    "HELD BY",
    "IMPORTANCE",
    "STATE",
)  # the state last: its width changes with the clock


def _cells(rows: Iterable[views.Holding]) -> list[tuple[str, ...]]:
    return [
        (row.name, size(row.bytes), row.where, row.holder, ", ".join(row.marks), row.state)
        for row in rows
    ]


def _queue(snapshot: Snapshot) -> list[str]:
    queue = words.waiting(snapshot)
    return (
        [f"Waiting: {len(queue)}", *(f"  {n}. {clean(line)}" for n, line in enumerate(queue, 1))]
        if queue
        else []
    )


def _past(snapshot: Snapshot) -> list[str]:
    lines = []
    if snapshot.events:
        last = snapshot.events[-1]
        lines.append(
            f"Last decision  {clock(last.wall)}  {clean(last.model)} {clean(words.told(last))}"
        )
    return [*lines, words.counters(snapshot)] if any(snapshot.totals.values()) else lines


def nothing_yet(prompt: str, registered: Sequence[str] = ()) -> str:
    """What to type where there is nothing to see."""
    if registered:
        return (
            f"Nothing is loaded. Registered here: {clean(', '.join(registered))}. Load one:  "
            f"{prompt} preload {clean(registered[0])}"
        )
    first = "" if prompt == "%gpu" else "%load_ext gpu  and  "
    where = "" if prompt == "%gpu" else ", in a notebook"
    return f"Nothing is loaded yet. Load a model{where}:  {first}%gpu load NAME PATH"


def size(count: int | None) -> str:
    return "unknown" if count is None else show_bytes(count)


# -- bars ---------------------------------------------------------------------------------------------------------


def draw(bar: Bar, cells: int = BAR_CELLS) -> tuple[str, str]:
    """A device's bar, and the legend that says which stretch is whose.

    >>> from gpu_runtime.facts import Device
    >>> draw(Bar(Device("sim:0", 16), (Segment("a", 8, lease="1/a"), Segment("b", 4, lease="1/b")), 14), cells=16)
    ('████████▓▓▓▓··│·', '█ a 8 B  ▓ b 4 B')
    """
    scale, drawn, legend, end = bar.scale_bytes, "", [], 0
    leases = 0
    for segment in bar.segments:
        end += segment.bytes
        mark = _MARKS.get(segment.kind) or _LEASES[leases % 2]
        leases += segment.is_lease
        length = max(
            1, round(end / scale * cells) - len(drawn)
        )  # what is there is seen, however small
        drawn += mark * length
        legend.append(f"{mark} {clean(segment._replace(label=shorten(segment.label, 28)).title)}")
    drawn = drawn[:cells].ljust(cells, _FREE)
    if bar.limit_bytes < scale:
        at = min(cells - 1, round(bar.limit_bytes / scale * cells))
        drawn = drawn[:at] + _LIMIT + drawn[at + 1 :]
    return drawn, "  ".join(_short(legend))


def _short(legend: list[str], most: int = 8) -> list[str]:
    return legend if len(legend) <= most else [*legend[:most], f"and {len(legend) - most} more"]


# -- tables -------------------------------------------------------------------------------------------------------


def width(text: str) -> int:
    """Columns that the text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, longest: int = LONGEST) -> str:
    """The text with its middle left out where it is too long: both ends of a name tell it from others.

    >>> shorten("Qwen/Qwen3-Embedding-0.6B", 15)
    'Qwen/Qw…ng-0.6B'
    """
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}…{text[-(longest - longest // 2 - 1) :]}"


def table(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    right: Sequence[int] = (),
    longest: int = LONGEST,
) -> list[str]:
    """Aligned lines; columns where nothing stands are left out."""
    cells = [[shorten(clean(cell), longest) for cell in row] for row in rows]
    columns = [n for n in range(len(headers)) if any(row[n] for row in cells)]
    widths = {
        n: max(width(text) for text in (headers[n], *(row[n] for row in cells))) for n in columns
    }

    def line(row: Sequence[str]) -> str:
        padded = ((" " * (widths[n] - width(row[n])), row[n]) for n in columns)
        return "  ".join(
            pad + text if n in right else text + pad
            for n, (pad, text) in zip(columns, padded, strict=True)
        ).rstrip()

    return [line(headers), *map(line, cells)]


def frame(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A DataFrame's records for people: sizes, durations and clock times in words."""
    counted = ("bytes", "_seconds", "uses", "pins", "importance")
    numbers = [n for n, name in enumerate(columns) if name.endswith(counted)]
    heads = [name.removesuffix("_seconds").replace("_", " ").upper() for name in columns]
    return "\n".join(
        table(
            [[cell(name, record[name]) for name in columns] for record in records], heads, numbers
        )
    )


def cell(column: str, value: Any) -> str:
    if value is None or value != value:  # NaN and NaT differ from themselves
        return "unknown" if column.endswith("bytes") else ""
    if column.endswith("bytes"):
        return show_bytes(int(value))
    if column.endswith("_seconds"):
        return show_seconds(value)
    if hasattr(value, "strftime"):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else ""
    return str(value)


# -- answers ------------------------------------------------------------------------------------------------------


def health(health_: Health) -> str:
    used = "unknown" if health_.used_percent is None else f"{health_.used_percent:.0f} %"
    return (
        f"{'healthy' if health_.healthy else 'NOT healthy'} · pressure {health_.pressure} · used {used} · "
        f"{health_.message}"
    )


def outcome(done: Outcome) -> str:
    """What a verb did, in one line."""
    said, sized = done.because.rstrip("."), show_bytes(done.bytes)
    facts = [
        sized if sized not in said else "",
        show_seconds(done.seconds) if done.bytes and done.seconds else "",
    ]
    told = ", ".join(filter(None, facts))
    head = f"{done.verb} {done.name}".strip() + ("" if done.done else ", not done")
    return clean(f"{head}: {said}" + (f" ({told})" if done.bytes and told else ""))


def applied(done: Applied) -> str:
    """What became of a file of models, and what has no effect here."""
    return "\n".join([applied_head(done), *(f"  {clean(note)}" for note in done.notes)])


def applied_head(done: Applied) -> str:
    told = [
        f"{len(names)} {what} ({clean(', '.join(names))})"
        for what, names in (
            ("new", done.added),
            ("changed", done.changed),
            ("unchanged", done.unchanged),
        )
        if names
    ]
    return f"apply {clean(done.file)}: {', '.join(told)}"


def block(block_: Any) -> str:
    """What a leased cell took: None is unknown, never zero."""
    leased = (
        f"{show_bytes(block_.bytes)} leased on {block_.device.id}"
        if block_.bytes
        else f"on {block_.device.id}"
    )
    if block_.peak_bytes is None and block_.delta_bytes is None:
        return f"{leased} · peak and delta unknown: only torch on a real card tells them"
    sign = "+" if (block_.delta_bytes or 0) > 0 else ""
    return f"peak {size(block_.peak_bytes)} · {leased} · delta {sign}{size(block_.delta_bytes)}"


def plan(plan_: Plan, snapshot: Snapshot, subject: str = "", prompt: str = "%gpu") -> str:
    """The verdict, its reason, the steps in words, the bars after them."""
    lines = [
        f"{clean(words.verdict(plan_))}{' · simulated' if snapshot.simulated else ''}",
        clean(plan_.because),
    ]
    if needs := words.needs(plan_):
        lines.append(f"Needs {clean(needs)}{words.on_cards(plan_)}")
    lines += [
        f"  {line}"
        for line in table(words.parts(plan_), ("PART", "SIZE", "FROM"), right=(1,), longest=100)
        if words.parts(plan_)
    ]
    lines += [f"  {clean(note)}" for note in words.notes(plan_)]
    lines += [
        f"  {n}. {clean(words.step_sentence(snapshot, step))}"
        for n, step in enumerate(plan_.steps, 1)
    ]
    after = views.bars_after(snapshot, plan_.steps)
    names = max((len(bar.device.id) for bar in after), default=0)
    for bar in after:
        drawn, legend = draw(bar)
        lines += [
            f"then  {bar.device.id:{names}}  {drawn}  {show_bytes(bar.used_bytes)}",
            f"{'':{8 + names}}{legend}",
        ]
    if others := words.others_considered(plan_):
        lines.append("Also considered:" if plan_.granted else "Considered:")
        lines += [f"  {place} {clean(because)}" for place, because in others]
    if plan_.steps:
        lines.append(f"Nothing was done. {words.how(plan_, subject, prompt)}")
    return "\n".join(line.rstrip() for line in lines if line.strip())


def why(name: str, events: Sequence[Event], prompt: str = "%gpu") -> str:
    """The last decisions, newest first."""
    if not events:
        return f"Nothing was decided on {clean(name)} yet. What would happen:  {prompt} plan {clean(name)}"
    return "\n".join(
        f"{clock(event.wall)}  {clean(event.model)} {clean(words.told(event))}"
        for event in words.worth_a_line(events)
    )


def config(rows: Sequence[Any]) -> str:
    """Every setting, its value, what set it, and what it means."""
    cells = [
        (row.name, row.value, "" if row.source == "default" else row.source, row.doc)
        for row in rows
    ]
    return "\n".join(table(cells, CONFIG, longest=200))


CONFIG = ("SETTING", "VALUE", "SET BY", "MEANING")


def preset(settings: Mapping[str, str]) -> str:
    """Lines for a shell."""
    return "\n".join(f"export {name}={value}" for name, value in settings.items())
