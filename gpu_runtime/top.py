"""`gpu top`: the status of this machine in a terminal, drawn again each second, with keys that act.

The class Top has what is shown and what a key does; `run` has the terminal. An action runs in a thread, so that a
process that does not answer does not stop the view. The ledger and the system decide who may act.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TextIO

from . import threads
from .errors import GpuError
from .facts import KERNEL, LeaseId, Snapshot
from .rendering import text, views

DRAW_SECONDS = 1.0
ANSWER_SECONDS = 30.0  # the longest wait for a process
SORTS: dict[str, Callable[[views.Process], Any]] = {
    "cards": lambda process: (-process.card_bytes, -process.host_bytes),
    "RAM": lambda process: -process.host_bytes,
    "last cell": lambda process: -process.idle_seconds,
    "user": lambda process: (process.user, process.name),
}
ACTIONS = {"p": "park", "e": "evict the models of", "i": "interrupt", "x": "end"}
HELP = "↑↓ choose · s sort · / filter · p park or unpark · e evict · i interrupt · x end · q quit"
UP, DOWN, ENTER, ESCAPE, ERASE = ("\x1b[A", "k"), ("\x1b[B", "j"), "\r\n", "\x1b", "\x7f\x08"


class Top:
    """The view of `rt` in one terminal."""

    def __init__(self, rt: Any, start: Callable[[Callable[[], None]], Any] = threads.start) -> None:
        """`start` runs a function in a thread; tests replace it."""
        self._rt, self._start = rt, start
        self._sort, self._words, self._typing = 0, "", False
        self._chosen = ""  # the id of the chosen process
        self._asked = ""  # the key of the action that is to be confirmed
        self._said = ""  # the outcome of the last action
        self._outcomes: SimpleQueue[str] = SimpleQueue()
        self._shown: list[views.Process] = []

    def screen(self, snapshot: Snapshot, width: int, height: int, now: str) -> list[str]:
        """The lines of a terminal of this size at the time of day `now`."""
        words = self._words.lower().split()
        sort, by = list(SORTS.items())[self._sort]
        self._shown = [
            row
            for row in sorted(views.processes(snapshot), key=by)
            if all(word in f"{row.name} {row.user} {row.state} {row.pid}".lower() for word in words)
        ]
        if self._chosen not in {process.id for process in self._shown}:
            self._chosen = self._shown[0].id if self._shown else ""
        while not self._outcomes.empty():
            self._said = self._outcomes.get()
        process = self._process
        if self._typing:
            last = f"Filter: {self._words}▏ (Enter keeps it, Esc clears it)"
        elif self._asked and process:
            name = text.shorten(process.name, 30)  # y and n must be seen in a narrow terminal, too
            last = f"y or n: {ACTIONS[self._asked]} {name} (pid {process.pid}) of {process.user}?"
        else:
            last = self._said or HELP
        filtered = f", with {self._words!r}" if self._words else ""
        title = f"By {sort}{filtered}"
        return text.screen(snapshot, self._shown, self._chosen, title, last, (width, height), now)

    @property
    def _process(self) -> views.Process | None:
        return next((process for process in self._shown if process.id == self._chosen), None)

    def key(self, key: str) -> bool:
        """Does what the pressed `key` is for. Returns whether the view goes on."""
        if self._typing:
            self._type(key)
        elif self._asked:
            row, verb = self._process, self._asked
            self._asked = ""
            if key in ("y", "Y") and row is not None:
                self._said = f"{ACTIONS[verb].capitalize()} {row.name}: waiting for its answer …"
                self._start(lambda: self._outcomes.put(self._act(verb, row)))
        elif key in ("q", "Q", "\x03"):
            return False
        elif key in (*UP, *DOWN) and self._shown:
            ids = [process.id for process in self._shown]
            step = 1 if key in DOWN else -1
            self._chosen = ids[min(len(ids) - 1, max(0, ids.index(self._chosen) + step))]
        elif key == "s":
            self._sort = (self._sort + 1) % len(SORTS)
        elif key == "/":
            self._typing = True
        elif key in ACTIONS and self._process:
            self._asked = key
        self._said = self._said if key in ("y", "Y") else ""
        return True

    def _type(self, key: str) -> None:
        if key in ENTER or key == ESCAPE:
            self._typing = False
            self._words = "" if key == ESCAPE else self._words
        elif key in ERASE:
            self._words = self._words[:-1]
        elif key.isprintable():
            self._words += key

    def _act(self, verb: str, process: views.Process) -> str:
        """Carries out the action, and returns its outcome in words."""
        try:
            if verb in "ix":
                return self._rt.interrupt(process.id, end=verb == "x").because
            if verb == "p":
                act = self._rt.evict if process.card_bytes else self._rt.preload
                return act(LeaseId(process.id, KERNEL), timeout=ANSWER_SECONDS).because
            done = [
                self._rt.evict(LeaseId(process.id, lease.name), timeout=ANSWER_SECONDS).because
                for lease in process.section.leases
                if lease.kind == "model" and lease.on_device
            ]
            return "; ".join(done) or f"{process.name} has no model on a card"
        except GpuError as error:
            return " ".join(str(error).split())


def run(rt: Any, stream: TextIO | None = None) -> None:
    """Shows `rt` on `stream`, by default standard output, until `q` or Ctrl-C. Raises GpuError without a terminal."""
    stream = sys.stdout if stream is None else stream
    if not all(file is not None and file.isatty() for file in (stream, sys.stdin)):
        raise GpuError("gpu top needs a terminal. For programs:  gpu status --json")
    top, goes_on = Top(rt), True
    with _raw(stream):
        while goes_on:
            size = shutil.get_terminal_size()
            lines = top.screen(rt.status(), size.columns, size.lines, time.strftime("%H:%M:%S"))
            stream.write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
            stream.flush()
            if select.select([sys.stdin], [], [], DRAW_SECONDS)[0]:
                pressed = os.read(sys.stdin.fileno(), 32).decode(errors="ignore")
                goes_on = bool(pressed) and top.key(pressed)


@contextmanager
def _raw(stream: TextIO) -> Iterator[None]:
    """A block in which keys arrive at once, on the terminal's second screen, without a cursor."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        stream.write("\x1b[?1049h\x1b[?25l")
        yield
    except KeyboardInterrupt:  # it ends the view, as `q` does
        pass
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        stream.write("\x1b[?25h\x1b[?1049l")
        stream.flush()
