"""The tabs of the console. Each tab connects the poller's data to widgets; `data` computes the contents.

The class `Tab` says what a tab is; TABS, at the end, has the tabs in their order.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple

import msgspec
import panel as pn
import panel_material_ui as pmui

from gpu_runtime import threads
from gpu_runtime.errors import BadSize, GpuError
from gpu_runtime.facts import (
    HOST,
    IMPORTANCE,
    LAYOUTS,
    AllocatorMap,
    Event,
    History,
    ModelSpec,
    PlanLevel,
    ProblemKind,
    Snapshot,
    Step,
    problems,
)
from gpu_runtime.files import newest_log, part_of
from gpu_runtime.rendering.html import esc
from gpu_runtime.rendering.views import GOVERNOR_OFF, after, counters, touched, versions
from gpu_runtime.safe_text import clean
from gpu_runtime.units import parse_room

from .actions import Actions
from .data import fragmentation, hours, serving_rows, whatif
from .data.cells import Column, Row, as_json, encoded, lease_styles
from .data.devices import Rows, device_rows, past_rows
from .data.members import may_act_on
from .data.rows import (
    LEASES,
    MODELS,
    NOTEBOOKS,
    QUEUE,
    Variables,
    leases,
    models,
    notebooks,
    pressed,
    queue,
    variables,
)
from .data.timeline import Range, csv_of, lines, merged, timeline
from .data.whatif import PlanAnswer
from .poller import Poller
from .widgets import MOST_SECONDS, Devices, Prose, Table, Timeline

# -- the base class of a tab
#
#     class QueueTab(Tab):
#         title = "Queue"
#
#         def __init__(self, poller, actions):
#             super().__init__(poller, actions)
#             self.table = ...                       # Panel objects, made once
#             self.panel = pn.Column(self.table)
#
#         def update(self, snapshot):
#             rows = self.poller.once("queue", snapshot, queue_rows)  # computed once for all sessions
#             ...                                    # patch what differs; never rebuild
#
# A session makes a tab when the tab is first opened, and updates only the tab in front. So a tab that is not open costs
# nothing. The document's lock is held during each call of a tab, so a tab must not wait. `poller.latest` returns data
# that the Snapshot does not have, and never waits. TABS lists the tabs.

MOST_TYPED = 200  # characters of a text in the URL


class Tab:
    """One tab in one session. Its buttons call `actions`, which asks for a confirmation. A viewer gets no buttons."""

    title: ClassVar[str]
    panel: Any  # the Panel object that is shown; set by __init__

    def __init__(self, poller: Poller, actions: Actions) -> None:
        self.poller, self.actions = poller, actions
        self._addressed: dict[str, tuple[Any, str, Any]] = {}  # key -> widget, parameter, default
        self.address_changed: Callable[[], None] = lambda: None  # set by the console

    def in_address(self, **widgets: Any) -> None:
        """Keeps the values of the `widgets`, also while a person types, in the page's URL under these names."""
        for key, widget in widgets.items():
            parameter = "value_input" if "value_input" in widget.param else "value"
            self._addressed[key] = widget, parameter, getattr(widget, parameter)
            widget.param.watch(lambda _: self.address_changed(), parameter)

    def address(self) -> dict[str, str]:
        """The part of the URL that opens the present view of the tab. It has the values of the tab's widgets."""
        found = {}
        for key, (widget, parameter, default) in self._addressed.items():
            value = getattr(widget, parameter)
            if default is None:  # the options are not known before the first update
                default = next(iter(widget.options), None)
            if value and value != default:
                found[key] = str(value)
        return found

    def visit(self, address: Mapping[str, str]) -> None:
        """Sets the widgets to the values in `address`. Unknown values are ignored, because `address` is from a URL."""
        for key, (widget, parameter, _) in self._addressed.items():
            value = address.get(key, "")
            options = getattr(widget, "options", None)
            if options is None and value:
                widget.param.update({"value": value[:MOST_TYPED], parameter: value[:MOST_TYPED]})
            elif options is not None and value in options:
                setattr(widget, parameter, value)

    def update(self, snapshot: Snapshot) -> None:
        """Shows `snapshot`. Called when the tab comes to the front, then once a second, and at urgent changes."""

    def encoded(
        self, key: str, snapshot: Snapshot, rows: Callable[[Snapshot], Sequence[Row]]
    ) -> str:
        """The rows of a table as JSON, with buttons if the visitor may act. `rows` is called once for all sessions."""
        may_act = self.actions.may_act
        make = lambda seen: encoded(rows(seen), may_act)
        return self.poller.once(f"{key} {may_act}", snapshot, make)

    def update_again(self) -> None:
        """Updates the tab with the last snapshot, for example after a change of a filter."""
        if self.poller.result.snapshot is not None:
            self.update(self.poller.result.snapshot)


FINGER_PIXELS = {"minWidth": 44, "minHeight": 44}  # pixels, for a finger
_PLAIN = {
    "textTransform": "none",
    "whiteSpace": "nowrap",
    "@media (pointer: coarse)": FINGER_PIXELS,
}
NO_CAPITALS: dict[str, Any] = {"sx": {**_PLAIN, "& button": _PLAIN}}  # shows sim:0, not SIM:0
BUTTONS: dict[str, Any] = {"size": "small", "margin": (5, 10), **NO_CAPITALS}
SELECT: dict[str, Any] = {  # with the height of a text field
    "size": "small",
    "sx": {"& .MuiSelect-select": {"py": "8.5px"}},
}


# -- Now: a row for each device, with the device's last 15 minutes, and the queue below the rows

# The length of the small history, its points for each device, and the seconds between two reads.
PAST_SECONDS, PAST_POINTS, PAST_EVERY = 900.0, 120, 5.0
NOBODY_WAITS = "No request is waiting."


def notices_html(snapshot: Snapshot) -> str:
    """HTML with a note if the governor is off in `snapshot`, and hints if there is no GPU or no lease,
    or if its processes run several versions.
    """
    parts = [] if snapshot.governed else [f'<div class="alarm">{esc(GOVERNOR_OFF)}</div>']
    if not snapshot.cards:
        parts.append(
            '<div class="hint">No GPU was found on this machine. To try the console with simulated '
            "devices: <code>GPU_DEVICES=sim:2x24GiB</code></div>"
        )
    has_lease = any(True for _ in snapshot.leases())
    others = {problem.kind for problem in problems(snapshot)} - {ProblemKind.UNLEASED}
    if not has_lease and not others:  # nobody is invited while something is wrong
        parts.append(
            '<div class="hint">No notebook holds memory yet. In a notebook, type <code>%load_ext gpu</code> and run '
            "torch code, or load a model: <code>%gpu load NAME PATH</code></div>"
        )
    if differ := versions(snapshot):
        parts.append(f'<div class="hint">{esc(differ)}</div>')
    return "".join(parts)


class NowTab(Tab):
    """The use of each device, the memory of each process, and the waiting requests."""

    title = "Now"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._notices = Prose(margin=(4, 10))
        self.devices = Devices(actions.propose, past_title="Last 15 min", margin=(0, 10))
        self.queue = Table(
            QUEUE, actions.propose, empty=NOBODY_WAITS, filters=False, margin=(8, 10)
        )
        self.notebooks = Table(
            NOTEBOOKS,
            lambda button, _: actions.propose(*pressed(button)),
            filters=False,
            margin=(8, 10),
        )
        self.panel = pn.Column(
            self._notices, self.devices, self.queue, self.notebooks, sizing_mode="stretch_width"
        )

    def update(self, snapshot: Snapshot) -> None:
        once, may_act = self.poller.once, self.actions.may_act
        self._notices.show(once("notices", snapshot, notices_html))
        rows = once(f"now {may_act}", snapshot, lambda seen: as_json(device_rows(seen, may_act)))
        self.devices.show(rows, self._past(snapshot))
        self.queue.show(self.encoded("queue", snapshot, queue))
        self.notebooks.show(self.encoded("notebooks", snapshot, notebooks))

    def _past(self, snapshot: Snapshot) -> str:
        fetch = lambda rt: rt.history(PAST_SECONDS, points=PAST_POINTS)
        past = self.poller.latest("now: past", fetch, PAST_EVERY)
        if past is None:
            return "{}"
        return self.poller.once(
            "now: past", past, lambda seen: as_json(past_rows(seen, snapshot.wall))
        )


# -- Models and Leases, each a table, and the variables of one notebook below the leases

CATALOGUE_SECONDS = 10.0  # between two reads of the catalogue


class TableTab(Tab):
    """A tab with one table. A subclass gives the columns and the rows."""

    columns: ClassVar[tuple[Column, ...]]
    empty: ClassVar[str]  # the text that is shown if there are no rows

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self.table = Table(self.columns, self._pressed, empty=self.empty, key=self.title.lower())
        self.panel = pn.Column(self.table, sizing_mode="stretch_width")

    def _pressed(self, verb: str, id: str) -> None:
        """Handles a press of the button `verb` in the row `id`."""
        self.actions.propose(verb, id)

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        """The rows for `snapshot`."""
        raise NotImplementedError

    def update(self, snapshot: Snapshot) -> None:
        self.table.show(self.encoded(self.title, snapshot, self.rows))


class ModelsTab(TableTab):
    """The tab with every model that has a lease, is registered or is in the catalogue."""

    title = "Models"
    columns = MODELS
    empty = (
        "No model is known yet. In a notebook: `%gpu load NAME PATH`; in a terminal: "
        "`gpu apply -f FILE`"
    )

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return models(snapshot, self._catalogue(), lease_styles(snapshot))

    def update(self, snapshot: Snapshot) -> None:
        self._catalogue()  # while a session requests the catalogue, the poller reads it again
        super().update(snapshot)

    def _catalogue(self) -> tuple[ModelSpec, ...]:
        return self.poller.latest("catalogue", read_catalogue, CATALOGUE_SECONDS) or ()


def read_catalogue(rt: Any) -> tuple[ModelSpec, ...]:
    """The models in the catalogue of the runtime `rt`, with the fields that the table shows."""
    return tuple(
        ModelSpec(
            entry["name"],
            entry["backend"],
            entry["source"],
            entry["bytes"] if isinstance(entry["bytes"], int) else None,
            importance=entry["importance"],
            keep=entry["keep"],
            enabled=entry["state"] != "disabled",
        )
        for entry in rt.catalog().to_dict("records")
    )


LEASE = "A lease is memory on one device that a process may use, as all processes have agreed in the ledger."


class LeasesTab(TableTab):
    """The tab with the table of leases. The variables of the last selected notebook are below its row."""

    title = "Leases"
    columns = LEASES
    empty = (
        "No process holds memory on a device. To load a model in a notebook: `%gpu load NAME PATH`"
    )

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._row = ""  # the id of the row whose variables are shown; empty: none
        self._answers: SimpleQueue[Variables] = SimpleQueue()  # from the threads that ask
        self.panel.insert(0, Prose(f'<div class="soft">{LEASE}</div>', margin=(4, 10)))

    def rows(self, snapshot: Snapshot) -> tuple[Row, ...]:
        return leases(snapshot, lease_styles(snapshot))

    def update(self, snapshot: Snapshot) -> None:
        super().update(snapshot)
        while not self._answers.empty():
            answer = self._answers.get()
            if answer.owner == self._row.partition("/")[0]:
                self._show(answer)

    def _pressed(self, verb: str, id: str) -> None:
        """Handles a press in the row `id`, which the browser sends and which is checked here."""
        snapshot = self.poller.result.snapshot
        if verb == "hide":
            self._row = self.table.detail = ""
            return
        owner = id.partition("/")[0]
        if snapshot is None or owner not in snapshot.sections or not self.actions.may_act:
            return
        if not may_act_on(owner, snapshot, self.actions.member):
            return
        if verb != "who":
            self.actions.propose(verb, "/".join(id.split("/")[:2]))
            return
        self._row = id
        self._show(Variables(owner, snapshot.sections[owner].owner.label))
        name, rt = self.actions.visitor.name, self.poller.rt
        threads.start(lambda: self._ask(rt, owner, name))

    def _ask(self, rt: Any, owner: str, name: str) -> None:
        """Requests the variables of the process `owner`, and waits for the answer. Runs in a thread."""
        snapshot = self.poller.result.snapshot
        section = snapshot.sections.get(owner) if snapshot else None
        label = section.owner.label if section else ""
        try:
            with rt.on_behalf_of(f"{name}, console"):
                frame = rt.who(owner)
            answer = Variables(owner, label, frame=frame)
        except GpuError as error:
            answer = Variables(owner, label, trouble=f"{error}")
        self._answers.put(answer)
        self.poller.nudge()

    def _show(self, answer: Variables) -> None:
        self.table.detail = as_json(variables(answer, self._row))


# -- Timeline: the place of each model, the evictions, and all events, in one range of time

WINDOWS = {"15 min": 900.0, "1 h": 3600.0, "2 h": 7200.0, "24 h": 86400.0, "7 days": 604800.0}
CUSTOM = "Custom"  # a range that the visitor has typed, or chosen by dragging
POINTS = 240  # moments of each device in the shown range
MOST_POINTS = 5_000  # the most that are read


class TimelineTab(Tab):
    """The tab with the timeline and the activity."""

    title = "Timeline"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        options = [*WINDOWS, CUSTOM]
        self.window = pmui.RadioButtonGroup(options=options, value="15 min", **BUTTONS)
        self.span = pmui.TextInput(visible=False)  # the custom range: two epoch seconds
        self.window.param.watch(lambda _: self.update_again(), "value")
        self.in_address(range=self.window, span=self.span)
        self._counters = Prose(margin=(6, 10, 0, 10))
        self.chart = Timeline(self._ranged, margin=(4, 10))
        self.save = pmui.FileDownload(
            callback=self._file,
            filename="events.csv",
            label="Save as CSV",
            size="small",
            margin=(5, 10),
            **NO_CAPITALS,
        )
        self.save.variant = "outlined"  # as an argument above it warns about `button_style`
        self.panel = pn.Column(
            self._counters,
            pn.FlexBox(self.window, self.save, align_items="center", sizing_mode="stretch_width"),
            self.chart,
            sizing_mode="stretch_width",
        )

    def _ranged(self, start: float, end: float) -> None:
        """Shows the time between the epoch seconds `start` and `end`."""
        self.span.param.update(value=f"{start:.0f}-{end:.0f}", value_input=f"{start:.0f}-{end:.0f}")
        if self.window.value == CUSTOM:
            self.update_again()
        else:
            self.window.value = CUSTOM

    def shown(self, snapshot: Snapshot) -> Range:
        """The range of time that the tab shows; the last 15 minutes if the typed range is not valid."""
        now = snapshot.wall
        seconds = WINDOWS.get(self.window.value)
        if seconds is None:
            start, _, end = (self.span.value or "").partition("-")
            if start.isdecimal() and end.isdecimal() and float(end) - float(start) >= 1:
                if now - MOST_SECONDS <= float(start) < now:
                    return Range(float(start), min(float(end), now))
            seconds = WINDOWS["15 min"]
        return Range(now - seconds, now)

    def update(self, snapshot: Snapshot) -> None:
        self._counters.show(
            f'<div class="soft">{esc(counters(snapshot))} since this machine started</div>'
        )
        past = self._past(snapshot)
        if past is None:
            return
        # All custom ranges share one key. Otherwise the poller would keep every range.
        key = self.window.value
        is_custom = self.window.value == CUSTOM
        drawing = self.poller.once(
            f"timeline {key}",
            past,
            lambda seen: as_json(timeline(seen, snapshot, self.shown(snapshot))),
        )
        found = self.poller.once(
            f"activity {key}",
            past if is_custom else snapshot,
            lambda _: as_json(lines(self._events(past, snapshot), snapshot)),
        )
        self.chart.show(drawing, found)

    def _past(self, snapshot: Snapshot) -> History | None:
        """The record of the shown range, or None while this record is being read."""
        shown = self.shown(snapshot)
        length, back = shown.end - shown.start, snapshot.wall - shown.start
        points = int(min(MOST_POINTS, POINTS * max(1.0, back / length)))
        is_custom = self.window.value == CUSTOM

        def fetch(rt: Any) -> History:
            """The record of the runtime `rt`."""
            seconds = rt.status().wall - shown.start if is_custom else back
            return rt.history(seconds, points=points)

        every = min(30.0, max(5.0, length / 300))
        return self.poller.latest(f"timeline {self.window.value} {self.span.value}", fetch, every)

    def _events(self, past: History | None, snapshot: Snapshot) -> list[Event]:
        """All events of the shown range. The newest event is first."""
        shown = self.shown(snapshot)
        found = merged(past.events if past else (), snapshot.events)
        return [event for event in found if shown.start <= event.wall <= shown.end]

    def _file(self) -> io.BytesIO:
        """Every event of the shown range, as a CSV file."""
        snapshot = self.poller.result.snapshot
        if snapshot is None:
            return io.BytesIO()
        events = self._events(self._past(snapshot), snapshot)
        return io.BytesIO(csv_of(events, snapshot).encode())


# -- Fragmentation: a table of the processes' allocators, and the map of one of these allocators

MAP_SECONDS = 0.5  # between two checks for new maps; unchanged maps are not read again
MAP_HINT = (
    "An allocator takes memory from the card in segments and cuts them into blocks. It returns a "
    "segment only when no block in it is in use, so one small tensor can keep a large segment. "
    "Compact returns the segments without a block in use. To free the others, evict the models "
    "in them and restore them: they are then placed side by side."
)


class MapFetcher:
    """Fetches the maps of all allocators. As long as no map changes, it returns the same object."""

    def __init__(self) -> None:
        self._last: tuple[AllocatorMap, ...] = ()

    def __call__(self, rt: Any) -> tuple[AllocatorMap, ...]:
        maps = rt.allocator_maps()
        if maps != self._last:
            self._last = maps
        return self._last


class FragmentationTab(Tab):
    """The memory that allocators hold and cannot use, and the chosen map; at first the one with the most of it."""

    title = "Fragmentation"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._chosen = ""  # id of a row; if it is empty or unknown, the first row's map is drawn
        columns = fragmentation.COLUMNS
        self.table = Table(columns, self._pressed, empty="Reading …", key="fragmentation")
        hint = Prose(f'<div class="note">{esc(MAP_HINT)}</div>', margin=(2, 10))
        self._head, self._map = Prose(margin=(2, 10)), Prose(margin=(2, 10))
        self._below = pn.Column(
            self._head, self._map, hint, visible=False, sizing_mode="stretch_width"
        )
        self.panel = pn.Column(self.table, self._below, sizing_mode="stretch_width")

    def update(self, snapshot: Snapshot) -> None:
        maps = self.poller.latest("maps", MapFetcher(), MAP_SECONDS)
        if maps is None:
            return
        memories = fragmentation.process_memories(maps, snapshot)
        chosen = next((memory for memory in memories if memory.id == self._chosen), None)
        chosen = chosen or next(iter(memories), None)
        self.table.empty = fragmentation.EMPTY
        may_act, id = self.actions.may_act, chosen.id if chosen else ""
        self.table.show(encoded(fragmentation.rows(memories, snapshot, may_act, id)))
        drawings = self.poller.once("drawings", maps, lambda _: dict[str, str]())  # by id, for all
        if chosen is not None:
            if chosen.map and id not in drawings:
                drawings[id] = fragmentation.drawing(chosen.map)
            self._head.show(fragmentation.report(chosen, snapshot))
            self._map.show(drawings.get(id, ""))
            self._map.visible = bool(drawings.get(id))
        self._below.visible = chosen is not None

    def _pressed(self, verb: str, id: str) -> None:
        """Handles a press in the row `id`, which the browser sends and which is checked here."""
        snapshot = self.poller.result.snapshot
        if snapshot is None:
            return
        owner = id.partition("/")[0]
        if owner not in {*snapshot.sections, snapshot.owner.id}:
            return
        if verb == "show":
            self._chosen = id
            self.update(snapshot)
        elif verb == "defrag":
            self.actions.propose("defrag", f"{owner}/")


# -- Hours: how the cards were used over days, by whom, and who waited for whom

SINCE = {"Day": "1d", "Week": "7d", "4 weeks": "28d"}
REPORT_SECONDS = 30.0  # between two reads of the account


class HoursTab(Tab):
    """The tab with the account of hours."""

    title = "Hours"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self.since = pmui.RadioButtonGroup(options=list(SINCE), value="Week", **BUTTONS)
        self.by = pmui.RadioButtonGroup(
            options=["User", "Notebook", "Model", "Card"], value="User", **BUTTONS
        )
        for choice in (self.since, self.by):
            choice.param.watch(lambda _: self.update_again(), "value")
        self.in_address(since=self.since, by=self.by)
        self.chart = Prose(margin=(6, 10))
        self.table = Table([], filters=False, margin=(10, 10))
        self._waits_head = Prose(
            "<h4>Who waited for whom</h4>", margin=(12, 10, 0, 10), visible=False
        )
        self.waits = Table([], filters=False, margin=(0, 10), visible=False)
        self.calendar = Prose(margin=(12, 10))
        hint = Prose(f'<div class="soft">{esc(hours.HINT)}</div>', margin=(10, 10))
        self.panel = pn.Column(
            pn.FlexBox(self.since, self.by, align_items="center", sizing_mode="stretch_width"),
            self.chart,
            self.table,
            self._waits_head,
            self.waits,
            self.calendar,
            hint,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        since = SINCE[self.since.value]
        over_time, found, waits = (
            self.poller.report(since, by, REPORT_SECONDS)
            for by in ("time", self.by.value.lower(), "waits")
        )
        if over_time is None or found is None or waits is None:
            return
        self.chart.show(self.poller.once("hours: chart", over_time, hours.chart))
        self.calendar.show(self.poller.once("hours: calendar", over_time, hours.calendar))
        _show_records(self.table, found)
        self.table.empty = hours.NO_HOURS
        between = [wait for wait in waits if wait["user"] != wait["waited_for"]]
        self.waits.visible = self._waits_head.visible = bool(between)
        _show_records(self.waits, between)


def _show_records(table: Table, records: Sequence[Mapping[str, Any]]) -> None:
    columns = [list(column) for column in hours.report_columns(records)]
    if table.columns != columns:
        table.columns = columns
    table.show(hours.report_rows(records))


# -- What if: a dry run of using a model or leasing a number of bytes; it changes nothing

FETCH_SECONDS = 2.0  # between two computations of the shown plan
NO_MODEL = "choose …"
ANY, USUAL = "any card", "as registered"
DAYS = 7.0  # of the history that is replayed
DRY_RUN_HINT = (
    "Choose a model, or type a size such as <code>14 GiB</code> and press Enter, to see what would happen: "
    "now, after others have left, after a wait, or never. This is a dry run: it changes nothing."
)


class PlanWish(NamedTuple):
    """A visitor's wish for a plan, in texts from a browser that `request_plan` checks."""

    subject: str
    cards: str = ANY
    layout: str = USUAL
    importance: str = USUAL

    @property
    def options(self) -> dict[str, str]:
        """The options of `rt.plan` that differ from the registration."""
        wished = {"devices": self.cards, "layout": self.layout, "importance": self.importance}
        return {name: value for name, value in wished.items() if value not in (ANY, USUAL)}


def request_plan(rt: Any, wish: PlanWish, models: Collection[str]) -> PlanAnswer:
    """The plan for the `wish`, which names one of `models` or a size such as `14 GiB`; else an error.

    The text is never used as the path of a file, since a visitor must not make the server read files.
    """
    try:
        wanted = wish.subject if wish.subject in models else parse_room(wish.subject)
        return PlanAnswer(rt.plan(wanted, **wish.options))
    except BadSize as error:
        return PlanAnswer(error=f"{error} Or choose one of the models.")
    except GpuError as error:
        return PlanAnswer(error=str(error))


def replayed(rt: Any, snapshot: Snapshot) -> str:
    """A sentence about the effect of more host memory, from a replay of the last days. A replay may take seconds."""
    card, now, more = whatif.host_choices(snapshot)
    try:
        frame = rt.backtest(days=DAYS, policy="lru", device=f"{card}B", host=f"{now}B,{more}B")
        return whatif.ram_sentence(frame.to_dict("records"), DAYS)
    except GpuError as error:  # the lines after the first one name commands of a terminal
        [text, *_] = str(error).splitlines()
        return text[:1].upper() + text[1:]


def rows_after(snapshot: Snapshot, steps: Sequence[Step]) -> str:
    """Rows, as JSON, of the devices that `steps` change. Each device has a row for now and a row for the time after."""
    changed = touched(steps)
    seen = snapshot, after(snapshot, steps)
    now, then = (device_rows(at_that_time, may_act=False) for at_that_time in seen)
    rows = [
        msgspec.structs.replace(
            row, id=f"{row.id} {when}", title=f"{row.title} {when}", busy="", celsius="", watts=""
        )
        for pair in zip(now.rows, then.rows, strict=True)
        for when, row in zip(("now", "after"), pair, strict=True)
        if row.id in changed
    ]
    has_card = any(device != HOST for device in changed)
    ticks = now.ticks if has_card else ()  # the ticks belong to the axis of the cards
    return as_json(Rows(ticks, tuple(rows)))


class WhatIfTab(Tab):
    """A form for a model or a size, the text of the plan, and the devices after the plan."""

    title = "What if"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
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
        look: dict[str, Any] = {"width": 160, "margin": (10, 10), **SELECT}
        self.cards = pmui.Select(label="Cards", options=[ANY], value=ANY, **look)
        self.layout = pmui.Select(
            label="Layout", options=[USUAL, *LAYOUTS[1:]], value=USUAL, **look
        )
        ranks = [USUAL, *IMPORTANCE]
        self.importance = pmui.Select(label="Importance", options=ranks, value=USUAL, **look)
        for choice in (self.cards, self.layout, self.importance):
            choice.param.watch(lambda _: self.update_again(), "value")
        self.preload = pmui.Button(label="Preload", visible=False, **BUTTONS)
        self.preload.on_click(lambda _: self._preload())
        self.more_ram = pmui.Button(
            label="Would more RAM have helped?", variant="outlined", **BUTTONS
        )
        self.more_ram.on_click(lambda _: self._ask_replay())
        self._replies: SimpleQueue[str] = SimpleQueue()  # from the threads that replay
        self.replay = Prose(margin=(4, 10))
        self.in_address(
            model=self.model,
            size=self.size,
            cards=self.cards,
            layout=self.layout,
            importance=self.importance,
        )
        self.model.param.watch(self._model_chosen, "value")
        self.size.param.watch(self._size_typed, "value")
        self.answer = Prose(f'<div class="hint">{DRY_RUN_HINT}</div>', margin=(4, 10))
        self.details = Prose(margin=(4, 10))
        wide = {"--names": "180px"}  # `sim:0 after` is longer than `sim:0`
        self.devices = Devices(visible=False, margin=(4, 10), styles=wide)
        self.panel = pn.Column(
            pn.FlexBox(self.model, self.size, self.cards, self.layout, self.importance),
            self.answer,
            self.preload,
            self.devices,
            self.details,
            self.more_ram,
            self.replay,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        models = self._offer_models(snapshot)
        subject = self._subject()
        wish = PlanWish(subject, self.cards.value, self.layout.value, self.importance.value)
        found = self._plan(wish, models) if subject else None
        if not subject:
            text = f'<div class="hint">{DRY_RUN_HINT}</div>'
        elif found is None:
            text = '<div class="hint">Computing …</div>'
        else:
            text = whatif.answer(found, snapshot)
        self.answer.show(text)
        self.details.show(whatif.details(found, snapshot) if found else "")
        plan = found.plan if found else None
        self._draw(snapshot, plan.steps if plan else ())
        is_useful = plan is not None and plan.level not in (PlanLevel.HERE, PlanLevel.NEVER)
        is_possible = is_useful and subject in models and not wish.options
        self.preload.visible = is_possible and self.actions.may_act
        while not self._replies.empty():
            self.replay.show(f"<p>{esc(self._replies.get())}</p>")
            self.more_ram.disabled = False

    def _offer_models(self, snapshot: Snapshot) -> list[str]:
        models = self.poller.once("what if: models", snapshot, whatif.model_choices)
        cards = [view.device.id for view in snapshot.cards]
        for choice, options in ((self.model, [NO_MODEL, *models]), (self.cards, [ANY, *cards])):
            if choice.options != options:
                value = choice.value if choice.value in options else options[0]
                choice.param.update(options=options, value=value)
        return models

    def _preload(self) -> None:
        snapshot, subject = self.poller.result.snapshot, self._subject()
        if snapshot is not None and subject in whatif.model_choices(snapshot):
            self.actions.propose("preload", whatif.preload_target(subject, snapshot))

    def _ask_replay(self) -> None:
        """Replays the last days in a thread, since a replay may take seconds."""
        snapshot, rt = self.poller.result.snapshot, self.poller.rt
        if snapshot is None or self.more_ram.disabled:
            return
        self.more_ram.disabled = True
        self.replay.show('<p class="soft">Replaying the last days …</p>')

        def work() -> None:
            """Replays the last days, and puts the answer on the page."""
            self._replies.put(replayed(rt, snapshot))
            self.poller.nudge()

        threads.start(work)

    def _subject(self) -> str:
        """The typed size or the chosen model. The result is "" if the visitor has done neither."""
        size = (self.size.value or "").strip()
        if size:
            return size
        return "" if self.model.value == NO_MODEL else self.model.value

    def _plan(self, wish: PlanWish, models: list[str]) -> PlanAnswer | None:
        return self.poller.latest(
            f"what if: {wish}", lambda rt: request_plan(rt, wish, models), FETCH_SECONDS
        )

    def _draw(self, snapshot: Snapshot, steps: Sequence[Step]) -> None:
        self.devices.visible = bool(steps)
        if steps:
            self.devices.show(rows_after(snapshot, steps))

    def _model_chosen(self, event: Any) -> None:
        """Plans for the chosen model, and clears the size field."""
        if event.new != NO_MODEL and self.size.value:
            self.size.value = ""  # this change calls `update_again`
        else:
            self.update_again()

    def _size_typed(self, event: Any) -> None:
        """Plans for the typed size, and unselects the model."""
        if event.new and self.model.value != NO_MODEL:
            self.model.value = NO_MODEL  # this change calls `update_again`
        else:
            self.update_again()


# -- Serving: the calls, clients, usage, jobs, breakers and engine logs of the server of this page

NO_LOG = "none"
LOG_BYTES = 1 << 14  # the most bytes of a log that are shown
LOG_LINES = 40


def _heading(title: str) -> Prose:
    return Prose(
        f'<div class="head"><span class="name">{title}</span></div>', margin=(10, 10, 0, 10)
    )


class ServingTab(Tab):
    """The tab with the figures of `gpu serve` since the server began."""

    title = "Serving"

    def __init__(self, poller: Poller, actions: Actions) -> None:
        super().__init__(poller, actions)
        self._summary = Prose(margin=(6, 10, 0, 10))
        self.models = Table(serving_rows.MODELS, empty="No model was called yet.", filters=False)
        self.clients = Table(serving_rows.CLIENTS, empty="No client has called yet.", filters=False)
        self.usage = Table(serving_rows.USAGE, empty="No call was counted yet.", filters=False)
        self.jobs = Table(serving_rows.JOBS, empty="No job is kept.", filters=False)
        self.engine = pmui.Select(
            label="Engine log", options=[NO_LOG], value=NO_LOG, width=260, **SELECT
        )
        self.log = Prose(margin=(0, 10))
        self.engine.param.watch(lambda _: self._show_log(), "value")
        self.logs = pn.Column(self.engine, self.log, visible=False, sizing_mode="stretch_width")
        self.panel = pn.Column(
            self._summary,
            _heading("Models"),
            self.models,
            _heading("Clients"),
            self.clients,
            _heading("Usage in 30 days"),
            self.usage,
            _heading("Jobs"),
            self.jobs,
            self.logs,
            sizing_mode="stretch_width",
        )

    def update(self, snapshot: Snapshot) -> None:
        figures = self.poller.serving
        if figures is None:
            return
        served = self.poller.once("serving", snapshot, lambda _: figures())
        self._summary.show(f'<div class="soft">{esc(serving_rows.summary(served))}</div>')
        self.models.show(encoded(serving_rows.model_rows(served)))
        self.clients.show(encoded(serving_rows.client_rows(served)))
        self.usage.show(encoded(serving_rows.usage_rows(served)))
        self.jobs.show(encoded(serving_rows.job_rows(served)))
        if self.actions.may_act:
            logged = self.poller.once("logged", served, _logged)
            self.engine.options = [NO_LOG, *logged]
            self.logs.visible = bool(logged)
            self._show_log()

    def _show_log(self) -> None:
        """Shows the end of the chosen engine's log. A viewer gets no log, because it may have texts of calls."""
        if self.actions.may_act:
            self.log.show(_end_of_log(self.engine.value))


def _logged(served: Any) -> list[str]:
    """The called models that have the log of an engine, in order."""
    return [name for name in sorted(served.models) if newest_log(name) is not None]


def _end_of_log(model: str) -> str:
    """The last lines of the log of the model's engine, as HTML; empty without a log."""
    log = newest_log(model) if model != NO_LOG else None
    if log is None:
        return ""
    try:
        text, _ = part_of(log, 0, LOG_BYTES)
    except OSError:  # it was deleted, as the oldest logs are
        return ""
    lines = [esc(clean(line)) for line in text.splitlines()[-LOG_LINES:]]
    shown = "\n".join(lines)
    return f"<pre><span>{shown}</span></pre>" if lines else '<div class="soft">It is empty.</div>'


# -- the tabs, in their order

TABS: dict[str, type[Tab]] = {
    tab.title: tab
    for tab in (
        NowTab,
        ModelsTab,
        LeasesTab,
        TimelineTab,
        HoursTab,
        FragmentationTab,
        WhatIfTab,
        ServingTab,
    )  # fmt: skip
}
SERVING = ServingTab.title  # only on the page of a server that serves models


# What the other tabs show would name the notebooks and models of other users.
FOR_MEMBERS = (NowTab.title, ModelsTab.title, LeasesTab.title, HoursTab.title)


def titles(member: str = "") -> list[str]:
    """The titles of the tabs that every page has, in their order; of those for a `member`, if there is one."""
    return [title for title in TABS if title != SERVING and (not member or title in FOR_MEMBERS)]
