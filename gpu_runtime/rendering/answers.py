"""What each answer says, once for both faces: every function here returns a Part, its text and its HTML. Pure.

`views.py` computes the facts and sentences; `text.py` and `html.py` paint bars, tables and lines. Beside the HTML of an
answer is its text, with the same words: a notebook's file keeps both.
"""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ..facts import (
    HOST,
    KERNEL,
    Applied,
    Device,
    Event,
    Health,
    Leaver,
    Outcome,
    OutOfMemoryStory,
    Plan,
    Replayed,
    Schedule,
    ScheduledModel,
    Snapshot,
    problems,
)
from ..owner.arrivals import LOADING, Arrival
from ..safe_text import clean
from ..tables import Table
from ..units import counted, show_bytes, show_rate, show_seconds
from . import html, text, views
from .html import code, esc, table_cell, td, with_code
from .views import Bar, clock

LONGEST_SHOWN = 30  # characters of a name in the HTML of the table of holders


class Part(NamedTuple):
    """A piece of an answer, or a whole answer: as lines of text, and as HTML."""

    text: str
    html: str


NOTHING = Part("", "")


def joined(*parts: Part, between: str = "\n") -> Part:
    """The `parts` below each other. In the text, `between` separates those that are not empty."""
    texts = [part.text for part in parts if part.text]
    return Part(between.join(texts), "".join(part.html for part in parts))


def page(*parts: Part, between: str = "\n") -> Part:
    """A whole answer: the `parts` below each other, in HTML with the style sheet."""
    whole = joined(*parts, between=between)
    return whole._replace(html=html.page(whole.html))


def line(words: str, soft: bool = False, indent: str = "") -> Part:
    """One line, in which HTML sets the command after a colon and two spaces as code."""
    return Part(f"{indent}{clean(words)}".rstrip(), html.line(with_code(words), soft=soft))


def numbered(sentences: Iterable[str]) -> Part:
    """A numbered list."""
    every = list(sentences)
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in every)
    lines = [f"  {n}. {clean(sentence)}" for n, sentence in enumerate(every, 1)]
    return Part("\n".join(lines), f'<ol class="g-list">{items}</ol>')


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str | Part]],
    kinds: Sequence[str],
    longest: int = text.LONGEST,
    indent: str = "",
) -> Part:
    """A table. A cell that HTML draws in its own way is a Part; others have the class of their column in `kinds`."""
    texts, cells = [], []
    for row in rows:
        texts.append([cell.text if isinstance(cell, Part) else cell for cell in row])
        cells.append(
            [
                cell.html if isinstance(cell, Part) else td(cell, kind)
                for cell, kind in zip(row, kinds, strict=True)
            ]
        )
    right = [n for n, kind in enumerate(kinds) if kind == "g-num"]
    lines = text.table(texts, [name.upper() for name in headers], right, longest)
    return Part("\n".join(f"{indent}{words}" for words in lines), html.table(headers, cells, kinds))


class Drawn(NamedTuple):
    """A bar with its title, and what is said after it: in the text, and in two columns of HTML."""

    title: str
    bar: Bar
    figures: str
    size: str
    remarks: str = ""


def bars(rows: Sequence[Drawn], before: str = "") -> Part:
    """The bars in `rows`. In the text, `before` is before each title."""
    lines = text.bars([row[:3] for row in rows], before)
    cells = [(f"<b>{esc(row.title)}</b>", html.bar(row.bar), row.size, row.remarks) for row in rows]
    return Part("\n".join(lines), html.devices(cells))


# -- status --------------------------------------------------------------------------------------


def status(snapshot: Snapshot, prompt: str = "%gpu") -> Part:
    """The devices, the queue, the holders and the last decision. Commands begin with `prompt`."""
    title, alarms = views.device_title(snapshot), views.alarms(snapshot)
    users = len(views.owners(snapshot))
    shared = f'<span class="g-soft">shared by {users} processes</span>' if users > 1 else ""
    head = Part(
        "\n".join([title, *alarms]),
        f'<div class="g-head"><b>{esc(title)}</b> {html.simulated(snapshot)} {shared}</div>'
        + "".join(f'<div class="g-alarm">{esc(alarm)}</div>' for alarm in alarms),
    )
    lines, queue = views.device_lines(snapshot), NOTHING
    width = max((len(device.fill) for device in lines), default=0)
    devices = bars([_device(device, width) for device in lines])
    holders, past = _holders(snapshot, prompt), _past(snapshot)
    if waiting := views.waiting(snapshot):
        queue = joined(Part(f"Waiting: {len(waiting)}", ""), numbered(waiting))
        inner = f"<b>Waiting: {len(waiting)}</b>{queue.html}"
        queue = queue._replace(html=f'<div class="g-wait">{inner}</div>')
    words = joined(head, devices, holders, queue, past, between="\n\n").text
    return page(head, devices, queue, holders, past)._replace(text=words)


def host(snapshot: Snapshot, prompt: str = "%gpu") -> Part:
    """The `snapshot` of one of several hosts, under the host's name."""
    title = views.host_title(snapshot)
    head = page(Part(f"── {title} ──", html.line(f"<b>{esc(title)}</b>")))
    return joined(head, status(snapshot, prompt))


def hosts(snapshots: Iterable[Snapshot], prompt: str = "%gpu") -> Part:
    """The `snapshots` of several hosts."""
    return joined(*(host(snapshot, prompt) for snapshot in snapshots), between="\n\n")


def _device(device: views.DeviceLine, width: int) -> Drawn:
    figures = f"{device.fill:>{width}}  {device.pressure:>5}  {device.remarks}"
    fill = f'{esc(device.fill)} <span class="g-soft">{device.pressure}</span>'
    return Drawn(device.title, device.bar, figures, fill, esc(device.remarks))


HOLDERS = {  # The state is the last column, because its width changes with time.
    "model": "", "size": "g-num", "where": "", "held by": "g-wrap", "importance": "", "state": "",
}  # fmt: skip


def _holders(snapshot: Snapshot, prompt: str) -> Part:
    rows, parts = views.holdings(snapshot), []
    if not any(row.kind in views.OURS for row in rows):
        parts.append(line(nothing_yet(prompt, [spec.name for spec in snapshot.specs])))
    if rows:
        shown = map(_holding, rows[: views.MOST_ROWS])
        parts.append(table([*HOLDERS], shown, [*HOLDERS.values()]))
    if len(rows) > views.MOST_ROWS:
        parts.append(line(f"and {len(rows) - views.MOST_ROWS} more:  {prompt} leases", soft=True))
    return joined(*parts)


def _holding(row: views.Holding) -> tuple[str | Part, ...]:
    state = td(row.state, "g-in-use" if row.state.startswith("in use") else "")
    if row.kind == "stays":  # a reason, which is long
        state = table_cell("td", esc(row.state), "g-wrap", "min-width:150px")
    marks = " ".join(f'<span class="g-mark">{esc(mark)}</span>' for mark in row.marks)
    name = esc(row.name)
    if len(row.name) > LONGEST_SHOWN:  # the end of a longer name is hidden
        name = f'<span title="{name}">{name}</span>'
    return (
        Part(row.name, table_cell("td", html.swatch(row) + name, "g-name")),
        text.size(row.bytes),
        row.where,
        row.holder,
        Part(", ".join(row.marks), table_cell("td", marks)),
        Part(row.state, state),
    )


def nothing_yet(prompt: str, registered: Sequence[str] = ()) -> str:
    """What `status` shows while nothing is loaded: a command with a `registered` model, if there is one."""
    if registered:
        return (
            f"Nothing is loaded. Registered here: {', '.join(registered)}. Load one:  "
            f"{prompt} preload {shlex.quote(registered[0])}"
        )
    if prompt == "%gpu":
        torch = "Tensors of plain torch code appear here by themselves. Load a model:"
    else:
        torch = "In a notebook, type  %load_ext gpu  and run torch code, or load a model:"
    return f"Nothing is loaded yet. {torch}  %gpu load NAME PATH"


def _past(snapshot: Snapshot) -> Part:
    parts = []
    if snapshot.events:
        last = snapshot.events[-1]
        time, subject = clock(last.wall), last.title
        if subject in ("", KERNEL):
            subject = views.holder(snapshot, last.owner)
        sentence = views.event_sentence(last)
        shown = html.line(
            f'<span class="g-soft">Last decision, {time}:</span>',
            f"<b>{esc(subject)}</b>",
            esc(sentence),
        )
        parts.append(Part(clean(f"Last decision  {time}  {subject} {sentence}"), shown))
    if any(snapshot.totals.values()):
        parts.append(line(views.counters(snapshot), soft=True))
    if versions := views.versions(snapshot):
        parts.append(line(versions, soft=True))
    return joined(*parts)


# -- the answers of verbs ------------------------------------------------------------------------


def note(words: str) -> Part:
    """The `words`, unchanged, in a fixed-width font."""
    return Part(words, html.page(html.pre(words)))


def hint(sentence: str) -> Part:
    """A `sentence` that ends with a command to type."""
    return Part(sentence, html.page(html.line(with_code(sentence))))


def health(found: Health) -> Part:
    """The health `found`, in one line."""
    state, fullest = "healthy" if found.healthy else "not healthy", found.fullest
    shown = html.line(
        html.pill(found.pressure),
        f"<b>{state}</b>",
        f'<span class="g-soft">{esc(fullest)}</span>',
        esc(found.message),
    )
    pressure = f"pressure {found.pressure}{fullest and ', ' + fullest}"
    words = f"{state.replace('not', 'NOT')} · {pressure} · {found.message}"
    return page(Part(words, shown))


def outcome(done: Outcome) -> Part:
    """The outcome `done` of a verb in one line, with the bytes that moved and the seconds."""
    because, moved = done.because.rstrip("."), show_bytes(done.bytes)
    figures = [] if moved in because else [moved]
    if done.bytes and done.seconds:
        figures.append(show_seconds(done.seconds))
    head = f"{done.verb} {done.name}".strip() + ("" if done.done else ", not done")
    detail = f"{because} ({', '.join(figures)})" if done.bytes and figures else because
    return page(_done(head, detail, done.done))


def _done(head: str, detail: str, is_done: bool = True) -> Part:
    shown = html.line(f"<b>{'✓' if is_done else '✗'} {esc(head)}</b>", esc(detail))
    return Part(clean(f"{head}: {detail}"), shown)


def applied(done: Applied) -> Part:
    """How many models of a file are new, changed and unchanged, with notes on fields that had no effect."""
    kinds = {"new": done.added, "changed": done.changed, "unchanged": done.unchanged}
    parts = [f"{len(names)} {kind} ({', '.join(names)})" for kind, names in kinds.items() if names]
    notes = "".join(f"<li>{esc(note)}</li>" for note in done.notes)
    below = Part(
        "\n".join(f"  {clean(note)}" for note in done.notes),
        f'<ul class="g-list">{notes}</ul>' if notes else "",
    )
    return page(_done(f"apply {done.file}", ", ".join(parts)), below)


def block(used: Any) -> Part:
    """The memory that the leased block of code `used` has used. None is shown as unknown, never as zero."""
    leased = f"on {used.device.id}"
    if used.bytes:
        leased = f"{show_bytes(used.bytes)} reserved {leased}"
    if used.peak_bytes is None and used.delta_bytes is None:
        words = f"{leased} · peak and delta unknown: only torch on a real card reports them"
    else:
        sign = "+" if (used.delta_bytes or 0) > 0 else ""
        delta = f"{sign}{text.size(used.delta_bytes)}"
        words = f"peak {text.size(used.peak_bytes)} · {leased} · delta {delta}"
    return page(line(words, soft=True))


def plan(found: Plan, snapshot: Snapshot, prompt: str = "%gpu") -> Part:
    """The plan `found` for `snapshot`: its verdict, reason and steps, and the devices after them."""
    verdict, mark = views.verdict(found), "✓" if found.granted else "✗"
    simulated = html.simulated(snapshot)
    head = Part(
        f"{clean(verdict)}{' · simulated' if simulated else ''}",
        f'<div class="g-head"><b>{mark} {esc(verdict)}</b> {simulated}</div>',
    )
    done = NOTHING
    if found.steps or found.obstacle:
        done = line(f"Nothing was done. {views.how_to_do_it(found, prompt)}", soft=True)
    needs, leaving, others = plan_details(found, snapshot)
    steps = _plan_steps(found, snapshot)
    return page(head, line(found.because), needs, steps, leaving, others, done)


def plan_details(found: Plan, snapshot: Snapshot) -> tuple[Part, Part, Part]:
    """What the model of the plan `found` needs, what may leave for it, and the places that were not chosen."""
    others = NOTHING
    if considered := views.others_considered(found):
        title = "also considered" if found.granted else "considered"
        cells = [(td(place), td(because, "g-wrap")) for place, because in considered]
        lines = [f"  {place} {clean(because)}" for place, because in considered]
        words = "\n".join([f"{title.capitalize()}:", *lines])
        others = Part(words, html.table((title, "why not"), cells))
    return _plan_needs(found), _leavers(found.leavers, snapshot), others


def _plan_needs(found: Plan) -> Part:
    parts = []
    if needs := views.needs(found):
        parts.append(line(f"Needs {needs}{views.on_cards(found)}", soft=True))
    if rows := views.parts(found):
        kinds = ("", "g-num", "g-soft g-wrap")
        parts.append(table(("part", "size", "from"), rows, kinds, 100, indent="  "))
    return joined(*parts, *(line(note, soft=True, indent="  ") for note in views.notes(found)))


def _plan_steps(found: Plan, snapshot: Snapshot) -> Part:
    if not found.steps:
        return NOTHING
    steps = numbered(views.step_sentence(snapshot, step) for step in found.steps)
    after = [
        Drawn(views.device_name(bar.device.id), bar, size, esc(size))
        for bar in views.bars_after(snapshot, found.steps)
        if (size := show_bytes(bar.used_bytes))
    ]
    then = Part("", html.line("Then:", soft=True))
    return joined(steps, then, bars(after, "then  ")) if after else steps


def _leavers(found: Sequence[Leaver], snapshot: Snapshot | None) -> Part:
    if not found or snapshot is None:
        return NOTHING
    rows, more = views.leavers(found, snapshot)
    kinds = ("", "", "", "", "g-num", "g-num", "g-num", "")
    shown = table(views.LEAVERS, rows, kinds, 20, indent="  ")
    rest = line(more, soft=True, indent="  ") if more else NOTHING
    return joined(line(views.LEAVERS_TITLE, soft=True), shown, rest)


def why(
    name: str, events: Sequence[Event], prompt: str = "%gpu", around: Snapshot | None = None
) -> Part:
    """The `events` about the model `name` as sentences, the newest first. Without one, a hint.

    The snapshot `around` names the processes, if the events are of several.
    """
    leaving = _leavers(getattr(events, "leavers", ()), around)
    if name and not events:
        command = f"{prompt} plan {name}"
        none = line(f"No decision about {name} is recorded. What would happen:  {command}")
        return page(none, leaving)
    lines, rows, parts = [], [], []
    for title, event in views.titled(events, around):
        time, sentence = clock(event.wall), views.event_sentence(event)
        lines.append(clean(f"{time}  {title} {sentence}"))
        shown = f"<b>{esc(title)}</b> {esc(sentence)}"
        rows.append((td(time, "g-soft"), table_cell("td", shown, "g-wrap")))
    if events:
        parts = [Part("\n".join(lines), html.table(("when", f"why {name}".rstrip()), rows))]
    if not name:
        what = "this notebook" if prompt == "%gpu" else "this host"
        none = "" if events else f"No decision about {what} is recorded. "
        parts.append(line(f"{none}About a model or a notebook:  {prompt} why NAME"))
    return page(*parts, leaving)


def replays(found: Sequence[Replayed]) -> Part:
    """The recorded decisions, and whether the scheduler decides the same now."""
    lines, rows = [], []
    for replay in found:
        time = clock(replay.wall)
        lines += [
            clean(f"{time}  {replay.model} {replay.decided}"),
            f"{'':10}{clean(replay.result)}  (decision {replay.id})",
        ]
        decided = table_cell("td", f"<b>{esc(replay.model)}</b> {esc(replay.decided)}")
        again = td(replay.result.removeprefix("Decided again: "))
        rows.append((td(time, "g-soft"), td(str(replay.id), "g-soft"), decided, again))
    headers = ("when", "number", "decision", "decided again")
    return page(Part("\n".join(lines), html.table(headers, rows)))


def story(found: OutOfMemoryStory, full: bool = True) -> Part:
    """Why a cell ran out of memory: all that is known, or unless `full` at most ten lines."""
    lines, rows, before = [clean(found.headline)], [], ""
    for label, words in found.rows(full):
        lines.append(f"  {label:14}{clean(words)}")
        inner = code(words) if label == "more" else esc(words)
        shown = td("" if label == before else label, "g-soft")
        rows.append(f"<tr>{shown}{table_cell('td', inner, 'g-wrap', 'max-width:760px')}</tr>")
        before = label
    head = html.line(f"<b>{esc(found.headline)}</b>")
    return page(Part("\n".join(lines), f"{head}<table>{''.join(rows)}</table>"))


def config(rows: Sequence[Any]) -> Part:
    """The settings in `rows`: each with its value, its source and its meaning."""
    cells = [
        (
            Part(row.name, table_cell("td", code(row.name))),
            row.value,
            "" if row.source == "default" else row.source,
            row.doc,
        )
        for row in rows
    ]
    kinds = ("", "", "g-wrap", "g-soft g-wrap")
    return page(table(("setting", "value", "set by", "meaning"), cells, kinds, 1000))


def preset(settings: Mapping[str, str]) -> Part:
    """The `settings` as lines for a shell."""
    return note("\n".join(f"export {name}={value}" for name, value in settings.items()))


# -- the tables of `%gpu models`, `%gpu who` and other verbs, in units for people, and of `%gpu next`
#
# A DataFrame keeps the raw numbers for code.

Paint = Callable[[Any], Part]  # a DataFrame -> what is shown
MOST_SHOWN = 60  # rows; of a longer table the first and the last rows are shown
# Columns of the table of allocators that repeat other columns, or that few people need. They are
# not shown, because about eight columns fit into a notebook. The DataFrame has them.
_NOT_SHOWN = (
    *("user", "pid", "notebook", "fragmentation_bytes", "fragmentation_percent"),
    *("alloc_retries", "ooms"),
)


def showing(frame: Any, paint: Paint) -> Any:
    """The table `frame`, displayed by `paint`. Selections of a DataFrame are plain DataFrames."""
    base = Table if isinstance(frame, Table) else sys.modules["pandas"].DataFrame
    shown = _class_that_shows(base, paint)(frame)
    shown.attrs = dict(frame.attrs)
    return shown


@functools.cache
def _class_that_shows(base: Any, paint: Paint) -> type:
    class Shown(base):
        """A table with its own text and HTML."""

        def __repr__(self) -> str:
            return paint(self).text

        def _repr_html_(self) -> str:
            return paint(self).html

    return Shown


def for_people(frame: Any) -> Part:
    """The table as aligned text under the names of its columns, and in the notebook's own style of tables."""
    columns, rows, more = rows_of(frame)
    numbers = [place for place, name in enumerate(columns) if text.is_number(name)]
    looks = [
        "white-space:nowrap" if text.is_number(name) else "text-align:left" for name in columns
    ]
    lines = text.table(rows, columns, numbers) if rows else ["(no rows)"]
    cells = [
        "<tr>" + "".join(table_cell("td", esc(cell), style=looks[n]) for n, cell in enumerate(row))
        for row in rows
    ]
    if more:
        words, middle = f"… {more} more rows …", MOST_SHOWN // 2
        lines.insert(1 + middle, words)
        cells.insert(middle, f'<tr><td colspan="{len(columns)}">{words}</td>')
    names = enumerate(columns)
    head = "".join(table_cell("th", esc(name), style=looks[n]) for n, name in names)
    body = f"<thead><tr>{head}</thead>{''.join(cells)}"
    return Part("\n".join(lines), f'<table class="dataframe">{body}</table>')


def rows_of(frame: Any, most: int = MOST_SHOWN) -> tuple[list[str], list[list[str]], int]:
    """The names of the columns, the cells of at most `most` rows, and the number of the other rows."""
    is_of_allocators = "reserved_bytes" in frame.columns
    columns = [name for name in frame.columns if not (is_of_allocators and name in _NOT_SHOWN)]
    more = max(0, len(frame) - most)
    records = frame.to_dict("records")
    if more:
        half = most // 2
        records = [*records[:half], *records[-half:]]
    owners = frame.attrs.get("owners")
    rows = [[text.cell(name, record[name], owners) for name in columns] for record in records]
    return columns, rows, more


WHO = ("name", "kind", "device", "holds", "frees", "cell", "what")
WHO_KINDS = ("g-wrap", "", "", "g-num", "g-num", "", "g-wrap")
_PARTS = (  # key of the sums -> words
    ("graph_bytes", "in autograd graphs"),
    ("cached_bytes", "cached"),
    ("unknown_bytes", "without a name"),
    ("unseen_bytes", "that no tensor explains"),
)


def who(frame: Any) -> Part:
    """The DataFrame `frame` of `rt.who()` as a table whose sizes are written for people."""
    rows = _who_rows(frame)
    sums = joined(*(line(sentence, soft=True) for sentence in sentences(frame.attrs)))
    if not rows:
        return page(line(_nothing(frame.attrs)), sums)
    return page(table(WHO, rows, WHO_KINDS), sums, between="\n\n")


def _who_rows(frame: Any) -> list[list[str]]:
    """The cells of the table. If all rows have the same device, the cells leave out the device."""
    records = frame.to_dict("records")
    several = len({record["device"] for record in records}) > 1
    return [
        [
            record["name"],
            record["kind"],
            views.device_name(record["device"]) if several else "",
            show_bytes(int(record["bytes"])),
            # What becomes free if only this name is deleted. Parked memory is in RAM.
            show_bytes(alone) + (" of RAM" if alone and record["device"] == HOST else ""),
            record["cell"],
            what(record),
        ]
        for record in records
        for alone in [int(record["alone_bytes"])]
    ]


def what(record: Mapping[str, Any]) -> str:
    """The last cell of a row: what holds the memory, and how much of it cannot be parked."""
    stays = f"{show_bytes(int(record['stays_bytes']))} stays" if record["stays"] else ""
    return "; ".join(filter(None, [clean(record["what"]), stays]))


def _nothing(sums: Mapping[str, Any]) -> str:
    if sums.get("note"):
        return "Nothing is listed."
    if not sums.get("whole", True):
        return "Nothing was found in the time allowed."
    return "No variable or output holds memory on a device."


def sentences(sums: Mapping[str, Any]) -> list[str]:
    """Sentences under the table, made from `sums`, the attributes of the DataFrame of `rt.who()`."""
    if not sums:
        return []
    lines = [f"{clean(sums['process'])} holds this."] if sums["process"] else []
    if sums["held_bytes"] or not sums["parked_bytes"]:
        parts = [f"{show_bytes(sums[key])} {words}" for key, words in _PARTS if sums[key]]
        held = show_bytes(sums["held_bytes"])
        explained = f"explained {show_bytes(sums['explained_bytes'])} of {held}"
        lines.append("; ".join(filter(None, [explained, ", ".join(parts)])) + ".")
    lines += [f"{clean(staying.words())}." for staying in sums["staying"]]
    if sums["stays"]:
        lines.append(f"It cannot be parked now: {clean(sums['stays'])}.")
    if sums["parked_bytes"]:
        parked = show_bytes(sums["parked_bytes"])
        lines.append(f"{parked} is parked in RAM, until a cell needs it.")
    if sums["left_out"]:
        size = show_bytes(sums["left_out_bytes"])
        lines.append(f"{sums['left_out']} more rows are not listed; they reach {size}.")
    if sums["note"]:
        lines.append(clean(sums["note"]))
    if not sums["whole"]:
        seconds = f"{sums['seconds']:.0f}"
        lines.append(f"The search stopped after {seconds} s: the figures are partial.")
    return lines


SCHEDULE = ("model", "first use", "where", "state")
NO_CELL_WAITS = "No cell waits that uses a model. Run All, then look again:  %gpu next"


def schedule(found: Schedule) -> Part:
    """The models that waiting cells use, each with its place and state."""
    rows = [
        (model.name, model.cell, views.device_name(model.where), _state(model))
        for model in found.models
    ]
    shown = table(SCHEDULE, rows, ("g-wrap",) * 4, 100) if rows else line(NO_CELL_WAITS)
    notes = ["Look-ahead is off (GPU_PREFETCH=never)."] if found.mode == "never" else []
    if found.loaded_ahead:
        notes.append(
            f"Loaded ahead so far: {found.loaded_ahead}; {found.used} used, {found.unused} not used."
        )
    return page(shown, *(line(note, soft=True) for note in notes))


def _state(model: ScheduledModel) -> str:
    if model.running:
        return "used by the running cell"
    if model.ahead:
        return "loaded ahead"
    if model.where == "moving":
        return "being moved"
    if model.loading:
        return "being loaded ahead"
    if model.where not in ("disk", "host"):
        return "on its device"
    return f"not loaded ahead: {model.because}" if model.because else "not loaded yet"


# -- the hosts of a fleet: one bar for each host

NO_HOSTS = "No host has joined the fleet. On each host:  gpu fleet join"


def fleet(hosts: Sequence[Snapshot]) -> Part:
    """One bar for each of the `hosts`, its models, and its number of waiting requests."""
    rows = []
    for snapshot in hosts:
        drawn, level, notes = _bar(snapshot), views.worst_level(snapshot), _host_notes(snapshot)
        fill = _fill(drawn)
        figures = f"{fill:>19}  {level:8}  {notes}"
        remarks = f"{html.pill(level)} {esc(notes)}"
        rows.append(Drawn(clean(snapshot.host), drawn, figures, esc(fill), remarks))
    return page(bars(rows) if rows else line(NO_HOSTS))


def as_chooser(
    hosts: Sequence[Snapshot], silent: Mapping[str, float], *, chosen: str, tab: str = ""
) -> str:
    """One bar for each of the `hosts`, whose name is a link to its page in the console, on the tab `tab`.

    `silent` maps each host that does not answer to the time, in epoch seconds, since which it has not
    answered; its figures are grey. `chosen` is the host whose page is open.
    """
    rows = []
    for snapshot in hosts:
        query = urlencode({"host": snapshot.host} | ({"tab": tab} if tab else {}))
        here = ' aria-current="page"' if snapshot.host == chosen else ""
        host = _bar(snapshot)
        drawn, fill, notes = html.bar(host), esc(_fill(host)), esc(_host_notes(snapshot))
        if snapshot.host in silent:
            since = clock(silent[snapshot.host])
            drawn, fill = (f'<div class="g-old">{part}</div>' for part in (drawn, fill))
            notes = f"no answer since {since}"
        elif count := len(problems(snapshot)):
            notes = f"<b>{counted(count, 'problem')}</b>, {notes}"
        name = f'<a href="?{esc(query)}"{here}>{esc(snapshot.host)}</a>'
        rows.append((name, drawn, fill, notes))
    return html.page(f'<nav class="g-hosts" aria-label="Hosts">{html.devices(rows)}</nav>')


def _bar(snapshot: Snapshot) -> Bar:
    """One bar for all cards of a host. A model on several cards has only one segment in the bar."""
    cards = [card for card in views.bars(snapshot) if not card.device.is_host]
    merged: dict[tuple[str, str, str], views.BarSegment] = {}
    for card in cards:
        for segment in card.segments:
            key = segment.label, segment.kind, segment.lease
            before = merged.get(key)
            size = segment.bytes + (before.bytes if before else 0)
            merged[key] = segment._replace(bytes=size)
    total = sum(card.device.total_bytes for card in cards)
    limit = sum(card.limit_bytes for card in cards)
    return Bar(Device(snapshot.host, total), tuple(merged.values()), limit)


def _fill(host: Bar) -> str:
    return f"{show_bytes(host.used_bytes)} of {show_bytes(host.device.total_bytes)}"


def _host_notes(snapshot: Snapshot) -> str:
    cards = snapshot.cards
    notes = [counted(len(cards), "card")]
    if snapshot.simulated:
        notes.append("simulated")
    if any(view.drained for view in cards):
        notes.append("drained")
    if waiting := len(snapshot.waiting):
        notes.append(f"{waiting} waiting")
    if snapshot.degraded:
        notes.append(snapshot.degraded)
    return ", ".join(notes)


# -- two lines about a load or a restore: its progress, and what stays after its end

STOP_IN_NOTEBOOK, STOP_IN_TERMINAL = "■ stops it", "Ctrl-C stops it"


def subject(name: str) -> str:
    """The model `name`, or the words for the memory of the notebook itself."""
    return "this notebook" if name == KERNEL else clean(name)


def running(arrival: Arrival, seconds: float, stop: str) -> Part:
    """The line of an `arrival` after `seconds`: bar, bytes, rate, time left, and how to `stop` it."""
    title, words = f"{arrival.verb} {subject(arrival.name)}", progress(arrival, seconds, stop)
    part = _part(arrival, seconds)
    filled = "█" * round(part * text.BAR_CELLS)
    drawn = html.track(html.stretch(part, html.COLOURS[2]) if part else "", words)
    row = (f"<b>{esc(title)}</b>", drawn, esc(words), "")
    return Part(f"{title}  {filled:·<{text.BAR_CELLS}}  {words}", html.page(html.devices([row])))


def progress(arrival: Arrival, seconds: float, stop: str) -> str:
    """The text after the bar: `6.0 GiB of 14.0 GiB · 2.1 GB/s · 4 s left · Ctrl-C stops it`."""
    size = show_bytes(arrival.all_bytes)
    if arrival.done_bytes:
        size = f"{show_bytes(arrival.done_bytes)} of {size}"
    left = seconds_left(arrival, seconds)
    figures = (
        size,
        show_rate(arrival.done_bytes, seconds),
        "" if left is None else f"{show_seconds(max(1.0, left))} left",
        stop,
    )
    return " · ".join(figure for figure in figures if figure)


def seconds_left(arrival: Arrival, seconds: float) -> float | None:
    """The seconds until the `arrival` ends, which began `seconds` ago; None if they are unknown.

    A restore does not report its bytes: it is expected to take as long as the model's last restore.
    """
    if arrival.done_bytes:
        left_bytes = max(0, arrival.all_bytes - arrival.done_bytes)
        return left_bytes * seconds / arrival.done_bytes
    left = arrival.expected_seconds - seconds
    return left if left > 0 else None


def _part(arrival: Arrival, seconds: float) -> float:
    """The part of the `arrival` that is done, from 0 to 1. An estimate from time is at most 0.95."""
    if arrival.done_bytes and arrival.all_bytes:
        return min(1.0, arrival.done_bytes / arrival.all_bytes)
    return min(0.95, seconds / arrival.expected_seconds) if arrival.expected_seconds else 0.0


def summary(arrival: Arrival, waited_seconds: float) -> str:
    """The line that stays after the `arrival`: `qwen: waited 12 s, loaded in 20 s (2.1 GB/s)`."""
    waited = f"waited {show_seconds(waited_seconds)}, " if waited_seconds else ""
    took = show_seconds(arrival.seconds)
    if arrival.failed:
        return f"{subject(arrival.name)}: {waited}{arrival.verb} stopped after {took}"
    done = "loaded" if arrival.verb == LOADING else "restored"
    rate = show_rate(arrival.all_bytes, arrival.seconds)
    figures = f" ({rate})" if rate else ""
    return f"{subject(arrival.name)}: {waited}{done} in {took}{figures}"
