"""What a session may do: ask first, look again, do it through the runtime, and say what came of it.

A click calls `propose`, which opens the dialog; nothing happens before it is confirmed. What is confirmed runs in a
thread of its own, so that an owner that does not answer holds up nobody; its outcome is shown by the next `update`.
"""

from __future__ import annotations

import html
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, NamedTuple

import panel as pn
import panel_material_ui as pmui
import param
from panel.custom import JSComponent

from gpu_runtime import threads
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import THIS_PROCESS, Outcome, Snapshot
from gpu_runtime.rendering.views import clean, clock

from .data.confirmations import VERBS, Proposal, changed, propose, question
from .poller import Watch

log = logging.getLogger("gpu_runtime")

MOST_TOLD = 4  # outcomes that stay on the page; what is still under way stays in any case
DONE_SECONDS = (
    20.0  # how long one that went well stays there; one that failed stays until others push it out
)
ANSWER_SECONDS = 30.0  # how long an owner is waited for


class Told(NamedTuple):
    """A line on what was asked for: under way, done, or not done."""

    number: int
    wall: float
    what: str
    state: str  # waiting, done, failed
    words: str = ""
    target: str = ""


class Ask(JSComponent):
    """The dialog's contents. `answered(answer, question's number)` is called with confirm or cancel."""

    lines = param.List([], doc="What is asked, a paragraph each.")
    confirm = param.String("", doc="The words of the button that does it.")
    grave = param.Boolean(False, doc="Whether it takes something from somebody.")
    question = param.Integer(0, doc="The number of the question.")

    _esm = "ask.js"
    _stylesheets = ["ask.css"]

    def __init__(self, answered: Callable[[str, int], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", **params)
        self._answered = answered

    def _handle_msg(self, data: Any) -> None:
        """What a browser says is a request like any other: it may say anything."""
        if isinstance(data, dict) and data.get("answer") in ("confirm", "cancel"):
            self._answered(data["answer"], data.get("question", 0))


class Actions:
    """The dialog of one session, and what came of what was confirmed in it.

    `visitor` says who it is and, each time anew, whether they may act.
    """

    def __init__(
        self,
        watch: Watch,
        visitor: Any,
        *,
        wall: Callable[[], float] = time.time,
        start: Callable[[Callable[[], None]], Any] = threads.start,
    ) -> None:
        self.watch, self.visitor = watch, visitor
        self._wall, self._start = wall, start
        self._numbers = itertools.count(1)
        self._asked: Proposal | None = None
        self._told: tuple[Told, ...] = ()  # the newest last
        self._came: SimpleQueue[Told] = SimpleQueue()  # from the threads that act
        self._ask = Ask(self._answer)
        # A click beside it, or Escape, closes it: that is a no.
        self.dialog = pmui.Dialog(
            self._ask, close_on_click=True, title_variant="h5", width_option="sm"
        )
        self.outcomes = pn.pane.HTML(
            "",
            visible=False,
            sizing_mode="stretch_width",
            stylesheets=[OUTCOMES],
            margin=(12, 0, 0, 0),
        )
        self.panel = pn.Column(
            self.outcomes, *([self.dialog] if self.may_act else []), sizing_mode="stretch_width"
        )

    @property
    def may_act(self) -> bool:
        return bool(self.visitor.may_act)

    def button(self, verb: str, target: Callable[[], str], **look: Any) -> pmui.Button | None:
        """A button that proposes the verb for what `target` names when it is clicked; None for a viewer."""
        if not self.may_act:
            return None
        label = look.pop("label", VERBS[verb])
        return pmui.Button(label=label, on_click=lambda _: self.propose(verb, target()), **look)

    def propose(self, verb: str, target: str) -> None:
        """Asks whether to do this to the lease of that id (`owner id/name`; for defrag `owner id/`)."""
        snapshot = self.watch.look.snapshot
        if not self.may_act or snapshot is None or verb not in VERBS:
            return
        asked = propose(verb, target, snapshot)
        if why := changed(asked, snapshot):
            self._tell(asked, "failed", why)
            return
        asks = question(asked, snapshot)
        self._asked = asked
        self._ask.param.update(
            lines=[line for line in asks.lines if line],
            confirm=asks.confirm,
            grave=asks.grave,
            question=next(self._numbers),
        )
        self.dialog.param.update(title=asks.title, open=True)

    def _answer(self, answer: str, question: Any) -> None:
        if question != self._ask.question:  # of a dialog that is not there any more
            return
        asked, self._asked, opened = self._asked, None, self.dialog.open
        self.dialog.open = False
        if answer == "confirm" and asked is not None and opened and self.may_act:
            said = self._tell(
                asked, "waiting", f"{asks_of(asked, self.watch.look.snapshot)} was asked"
            )
            self._start(lambda: self._do(asked, said))

    def _do(self, asked: Proposal, said: Told) -> None:
        """In a thread: looks again, acts, and notes what came of it. Touches nothing of the page."""
        rt = self.watch.rt
        try:
            why = changed(asked, rt.status())
            done = (
                Outcome(asked.verb, asked.name, False, why)
                if why
                else perform(rt, asked, self.visitor.name)
            )
            came = said._replace(state="done" if done.done else "failed", words=done.because)
        except GpuError as error:
            came = said._replace(state="failed", words=str(error))
        except Exception as error:
            log.exception("%s", said.what)
            came = said._replace(state="failed", words=f"{type(error).__name__}: {error}")
        self._came.put(came._replace(wall=self._wall()))
        self.watch.nudge()

    def _tell(self, asked: Proposal, state: str, words: str) -> Told:
        what = f"{asked.verb} {asked.name}".strip()
        told = Told(next(self._numbers), self._wall(), what, state, words, asked.target)
        self._told = few((*self._told, told))
        self.update(None)
        return told

    def update(self, snapshot: Snapshot | None) -> None:
        """Shows what came of what was asked."""
        now = self._wall()
        while not self._came.empty():
            came = self._came.get()
            self._told = tuple(came if one.number == came.number else one for one in self._told)
        self._told = few(
            one for one in self._told if one.state != "done" or now - one.wall < DONE_SECONDS
        )
        snapshot = snapshot or self.watch.look.snapshot
        words = "".join(_line(one, silent(one, snapshot)) for one in reversed(self._told))
        if words != self.outcomes.object:
            self.outcomes.param.update(object=words, visible=bool(words))


def few(told: Iterable[Told]) -> tuple[Told, ...]:
    """The newest of them; one that is still waited for is kept, or its outcome would never be told."""
    kept = list(told)
    for one in [one for one in kept if one.state != "waiting"][: max(0, len(kept) - MOST_TOLD)]:
        kept.remove(one)
    return tuple(kept)


def perform(rt: Any, asked: Proposal, name: str) -> Outcome:
    """What came of it, done in the name of that person. Raises as the runtime does."""
    with rt.on_behalf_of(f"{name}, console"):
        if asked.verb == "defrag":
            return rt.defrag(asked.owner, timeout=ANSWER_SECONDS)
        if asked.verb in ("pin", "unpin"):
            return getattr(rt, asked.verb)(asked.address)
        return getattr(rt, asked.verb)(asked.address, timeout=ANSWER_SECONDS)


def asks_of(asked: Proposal, snapshot: Snapshot | None) -> str:
    """Whose answer is waited for."""
    owner = (
        snapshot.sections[asked.owner].owner
        if snapshot and asked.owner in snapshot.sections
        else None
    )
    return owner.label if owner else THIS_PROCESS


MARKS = {"waiting": "…", "done": "✓", "failed": "✗"}
OUTCOMES = """
div.told { border-left: 4px solid #808080; background: rgba(128, 128, 128, .12); padding: 4px 12px; margin: 0 0 4px;
  font-size: 13px; white-space: pre-line; }
div.done { border-color: #009e73; } div.failed { border-color: #d55e00; } div.waiting { border-color: #56b4e9; }
span { opacity: .75; font-variant-numeric: tabular-nums; }
"""


def silent(one: Told, snapshot: Snapshot | None) -> str:
    """Since when the process that was asked has not answered, in a sentence; empty where it may still be about to."""
    if snapshot is None or one.state != "waiting":
        return ""
    since = next((no.since for no in snapshot.unanswered if no.ticket.name == one.target), None)
    if since is None:
        return ""
    return (
        f" and does not answer, since {clock(snapshot.wall - (snapshot.now - since))}. "
        "Its process is stopped or stuck, and keeps what it holds until it answers or ends"
    )


def _line(one: Told, silence: str = "") -> str:
    return (
        f'<div class="told {one.state}" role="status"><span>{clock(one.wall)}</span> {MARKS[one.state]} '
        f"<b>{html.escape(clean(one.what))}</b>: {html.escape(one.words + silence)}</div>"
    )
