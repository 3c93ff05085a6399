"""The line that a cell shows while its model waits for memory, is loaded, or is restored.

A wait shows the holder of the memory and the place in the queue, and a load its progress. Then one line stays, such as
`qwen: waited 12 s, loaded in 20 s (2.1 GB/s)`. A wait of less than a second shows nothing, and no load after it of less
than half a second (GPU_PROGRESS_SECONDS).
"""

from __future__ import annotations

import html as escaping
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_runtime import threads
from gpu_runtime.facts import Lease, Snapshot, Ticket, Wait, holder_label, lease_title, where
from gpu_runtime.notebook import State, activity
from gpu_runtime.safe_text import lines
from gpu_runtime.units import show_bytes, show_seconds

QUIET_SECONDS = 1.0
RESUMED_SECONDS = 0.5  # a cell's next wait for the same name within this time continues the last
HOLDERS = "All holders, in a terminal:  gpu status"
REDRAW_SECONDS = 0.2
# A wait: its name, its beginning and its end, and the cell that waited.
_NOTHING = ("", 0.0, 0.0, State())
TOLD_AFTER_SECONDS = 5.0  # the notebook that holds the memory shows nothing about shorter waits


def sentence(name: str, wait: Wait, seconds: float) -> str:
    """Sentences about the `wait` of these `seconds` for the model `name`, or for this notebook's own memory (`kernel`).

    For example `You have waited 7 s for qwen (12.0 GiB on cuda:0). llama (14.0 GiB on cuda:0) is in use
    by train.ipynb (pid 4121) for 3 min. You are 3rd in the queue. All holders, in a terminal:  gpu status`.
    A notebook that waits runs no other cell, so the command is one for a terminal.
    """
    shares = wait.considered[0].shares if wait.considered else ()
    size = show_bytes(sum(share.bytes for share in shares))
    need = f" ({size} on {where(shares)})" if shares else ""
    wanted = "this notebook's own memory" if name == "kernel" else name.partition("#")[0]
    turn = f" You are {_ordinal(wait.ahead + 1)} in the queue." if wait.ahead else ""
    because = wait.because.rstrip(".")
    waited = f"You have waited {show_seconds(seconds)} for {wanted}{need}."
    return lines(f"{waited} {because}.{turn} {HOLDERS}").replace("\n", " ")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"


class Line:
    """One line above the output of a cell. Its text is changed in place."""

    count = 0  # lines made in this process, for their display ids; a notebook's file has no such id

    def __init__(self, notebook: bool) -> None:
        self._notebook, self._handle = notebook, None
        self.visible = False

    def show(self, line: str, html: str = "") -> None:
        """Shows this `line`; a notebook shows `html` instead, if it is given. An empty `line` removes the line."""
        if not line and not self.visible:
            return
        self.visible = bool(line)
        if self._notebook:
            self._display(line, html)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r{line}\x1b[K")
            sys.stderr.flush()

    def keep(self, line: str) -> None:
        """Shows this `line`, which stays. The next call of `show` makes a new line."""
        self.show(line)
        if not self._notebook and line and sys.stderr.isatty():
            sys.stderr.write("\n")
            sys.stderr.flush()
        self._handle, self.visible = None, False

    def _display(self, line: str, html: str) -> None:
        from IPython.display import display

        if line and not html:
            html = f"<small><i>{escaping.escape(line)}</i></small>"
        bundle = {"text/plain": line, "text/html": html}
        handle: Any = self._handle
        if handle is None:
            Line.count += 1
            self._handle = display(bundle, raw=True, display_id=f"gpu-line-{Line.count}")
        else:
            handle.update(bundle, raw=True)


class WaitLine:
    """Shows the waits and the loads of the main thread, each request in one line."""

    def __init__(
        self,
        notebook: bool,
        progress_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A load of more than `progress_seconds` shows its progress. `clock` returns seconds."""
        self._notebook, self._clock = notebook, clock
        self._progress_seconds = progress_seconds
        self._began: float | None = None  # when the present wait began; None without a wait
        self._last = _NOTHING  # the last wait
        self._waited = ("", 0.0)  # the name and the seconds of a visible wait that has just ended
        self._line = Line(notebook)
        self._redrawing: _Redrawing | None = None

    def __call__(self, name: str, wait: Wait | None) -> None:
        """Shows the `wait` for the model `name`; None: the wait is over. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        now = self._clock()
        if wait is None:
            if self._began is not None:
                self._last = (name, self._began, now, activity.state)
                if self._line.visible:
                    self._waited = (name, now - self._began)
            self._began = None
            self._line.show("")
        elif self._began is None:
            last, began, ended, cell = self._last
            same = (last, cell) == (name, activity.state)
            self._began = began if same and now - ended < RESUMED_SECONDS else now
            self._waited = ("", 0.0)
            self._line = Line(self._notebook)
        elif now - self._began >= QUIET_SECONDS:
            self._line.show(sentence(name, wait, now - self._began))

    def arrival(self, arrival: Any) -> None:
        """Shows that a load or a restore has begun, or has ended; see `owner/arrivals.py`."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not arrival.ended:
            if self._waited[0] != arrival.name:  # another model's line is not used again
                self._waited, self._line = ("", 0.0), Line(self._notebook)
            self._redrawing = _Redrawing(arrival, self._line, self._notebook, self._clock)
            self._redrawing.start(self._progress_seconds)
            return
        if self._redrawing is not None:
            self._redrawing.stop()
        self._last = _NOTHING
        self._redrawing, waited = None, self._waited[1]
        self._waited = ("", 0.0)
        if waited or self._line.visible or arrival.seconds >= self._progress_seconds:
            from gpu_runtime.rendering import answers

            # The return of a notebook's own memory has another line.
            is_own = arrival.name == answers.KERNEL
            self._line.keep("" if is_own else answers.summary(arrival, waited))


class _Redrawing:
    """Draws the progress of an arrival again and again, in a thread, until the arrival has ended."""

    def __init__(
        self, arrival: Any, line: Line, notebook: bool, clock: Callable[[], float]
    ) -> None:
        self._arrival, self._line, self._notebook = arrival, line, notebook
        self._clock, self._began = clock, clock()
        self._ended, self._drawing = threading.Event(), threading.Lock()

    def start(self, after_seconds: float) -> None:
        """Starts the drawing. Nothing is drawn in the first `after_seconds`, because most loads end sooner."""

        def draw_again() -> None:
            """Draws until the arrival has ended."""
            if self._ended.wait(after_seconds):
                return
            while not self._ended.wait(REDRAW_SECONDS):
                with self._drawing:
                    if not self._ended.is_set():
                        self.draw()

        threads.start(draw_again)

    def stop(self) -> None:
        """Ends the drawing. A drawing that has begun is completed first."""
        self._ended.set()
        with self._drawing:
            pass

    def draw(self) -> None:
        """Draws the progress as it is now."""
        from gpu_runtime.rendering import answers

        seconds = self._clock() - self._began + self._arrival.earlier_seconds
        stop = answers.STOP_IN_NOTEBOOK if self._notebook else answers.STOP_IN_TERMINAL
        shown = answers.running(self._arrival, seconds, stop)
        self._line.show(shown.text, shown.html if self._notebook else "")


class OthersWait:
    """Makes the line about another process that waits for memory of this notebook, once for each request."""

    def __init__(self) -> None:
        self._told: set[str] = set()  # keys of the requests

    def news(self, snapshot: Snapshot) -> str:
        """A sentence about new requests that have waited 5 s for a card on which this process holds memory; or ""."""
        me = snapshot.owner.id
        held = [lease for lease in snapshot.leases() if lease.owner == me and lease.on_device]
        cards = {share.device for lease in held for share in lease.shares}
        new = [
            ticket
            for ticket in snapshot.waiting
            if ticket.owner != me and ticket.key not in self._told
            if snapshot.now - ticket.arrived >= TOLD_AFTER_SECONDS
            if any(share.device in cards for share in ticket.need)
        ]
        self._told |= {ticket.key for ticket in new}
        return _of_request(snapshot, new[0], held, len(new) - 1) if new else ""


def _of_request(snapshot: Snapshot, ticket: Ticket, held: list[Lease], more: int) -> str:
    """Which process waits with `ticket`, for which of the leases `held`, and the command that frees this one.

    `more` is the number of further requests. The lease of a running block of code has no command.
    """
    section = snapshot.sections.get(ticket.owner)
    waiting = holder_label(section.owner, snapshot.owner) if section else "Another process"
    waited = show_seconds(snapshot.now - ticket.arrived)
    there = {share.device for share in ticket.need}
    ours = [lease for lease in held if any(share.device in there for share in lease.shares)]
    largest = max(ours, key=lambda lease: lease.bytes)
    act = "park" if largest.kind == "kernel" else f"evict {largest.name}"
    title = lease_title(largest, None) if largest.kind != "kernel" else "this notebook's code"
    others = f" and {more} more" if more else ""
    holding = f"{title} holds {show_bytes(largest.bytes)} there"
    free = "" if largest.kind == "block" else f" To let it in:  %gpu {act}"
    need = ticket.need_text
    return lines(f"{waiting}{others} has waited {waited} for {need}; {holding}.{free}")


def quiet_line(line: str) -> None:
    """Shows one `line` in small italics above the output of the cell."""
    Line(notebook=True).keep(line)
