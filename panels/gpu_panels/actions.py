"""The actions of one session, such as an eviction.

A click calls `propose`, which opens a dialog. An action starts only after the visitor has confirmed the dialog and
nothing has changed since the click. Each action runs in its own thread, so an owner that does not answer does not block
the page. The next call of `update` shows the outcome.
"""

from __future__ import annotations

import html
import itertools
import time
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any, NamedTuple

import panel as pn
import panel_material_ui as pmui

from gpu_runtime import alerts, threads
from gpu_runtime.errors import GpuError
from gpu_runtime.facts import Snapshot, problems
from gpu_runtime.rendering.views import clock
from gpu_runtime.safe_text import clean

from .acting import asked_process, attempt
from .data.confirmations import VERBS, Proposal, changed, propose, question
from .data.members import refusal
from .poller import Poller
from .widgets import ConfirmationForm

MARKS = {"ack": "Acknowledge", "silence": "Silence", "end": "End the silence of"}  # of a problem
WORDS = VERBS | MARKS
SILENCE_SECONDS = 3600.0
MOST_REPORTS = 4  # finished actions on the page; all actions in progress are shown in addition
# How long the outcome of an action is shown; a failed one also until it is closed
DONE_SECONDS, FAILED_SECONDS = 20.0, 600.0

SIGNS = {"waiting": "…", "done": "✓", "failed": "✗"}
OUTCOMES = """
div.outcome { border-left: 4px solid #808080; background: rgba(128, 128, 128, .12);
  padding: 4px 12px; margin: 0 0 4px; font-size: 13px; white-space: pre-line; }
div.done { border-color: #009e73; }
div.failed { border-color: #d55e00; }
div.waiting { border-color: #56b4e9; }
span { opacity: .75; font-variant-numeric: tabular-nums; }
"""


class ActionReport(NamedTuple):
    """The line about one action: in progress, done, or failed."""

    number: int
    wall: float  # epoch seconds
    action: str  # such as `evict qwen`
    state: str  # waiting, done, failed
    words: str = ""
    target: str = ""  # owner id / model name


class Actions:
    """The dialog of one session, and the outcomes of the confirmed actions."""

    _wall, _start = staticmethod(time.time), staticmethod(threads.start)  # tests replace them

    def __init__(self, poller: Poller, visitor: Any) -> None:
        """`visitor` has a name and the attribute `may_act`, which is read again before each action."""
        self.poller, self.visitor = poller, visitor
        # The user whose processes alone are acted on; empty: any.
        self.member: str = getattr(visitor, "member", "")
        self._numbers = itertools.count(1)
        self._asked: Proposal | None = None  # the action that the open dialog is about
        self._reports: tuple[ActionReport, ...] = ()  # the newest report is last
        self._finished: SimpleQueue[ActionReport] = SimpleQueue()  # from the threads that act
        self._form = ConfirmationForm(self._answered)
        # A click beside the dialog, or Escape, closes it without an action.
        self.dialog = pmui.Dialog(
            self._form, close_on_click=True, title_variant="h5", width_option="sm"
        )
        self.outcomes = pn.pane.HTML(
            "",
            visible=False,
            sizing_mode="stretch_width",
            stylesheets=[OUTCOMES],
            margin=(12, 10, 0, 10),
        )
        self.close = pmui.Button(
            label="Close", variant="text", size="small", visible=False, margin=(8, 10)
        )
        self.close.on_click(lambda _: self._close_failed())
        dialogs = [self.dialog] if self.may_act else []
        shown = pn.Row(self.outcomes, self.close, sizing_mode="stretch_width")
        self.panel = pn.Column(shown, *dialogs, sizing_mode="stretch_width")

    @property
    def may_act(self) -> bool:
        """Whether the visitor may act now."""
        return bool(self.visitor.may_act)

    def propose(self, verb: str, target: str) -> None:
        """Opens the dialog for `verb` on `target`; see `data.confirmations.propose`."""
        snapshot = self.poller.result.snapshot
        if not self.may_act or snapshot is None or verb.partition(" ")[0] not in VERBS:
            return
        proposal = propose(verb, target, snapshot)
        refused = refusal(proposal, snapshot, self.member) if self.member else ""
        if why_not := refused or changed(proposal, snapshot):
            self._report(proposal, "failed", why_not)
            return
        text = question(proposal, snapshot)
        host = getattr(self.poller.rt, "host", "")
        routed = f"The agent of {host} does this." if host else ""
        self._asked = proposal
        self._form.param.update(
            lines=[line for line in (*text.lines, routed) if line],
            confirm=text.confirm,
            grave=text.grave,
            question=next(self._numbers),
        )
        self.dialog.param.update(title=text.title, open=True)

    def mark(self, verb: str, name: str) -> None:
        """Acknowledges the problem `name`, or silences it for an hour. The names come from a browser."""
        snapshot = self.poller.result.snapshot
        if not self.may_act or self.member or snapshot is None:
            return
        found, by, wall = problems(snapshot), self.visitor.name, self._wall()
        try:
            if verb == "ack":
                state, words = "done", alerts.acknowledge(name, by, found, wall)
            elif verb == "end":
                state, words = "done", alerts.end_silence(name)
            else:
                state, words = "done", alerts.silence(name, by, found, wall, SILENCE_SECONDS)
        except (GpuError, OSError) as failure:
            state, words = "failed", str(failure)
        self._report(Proposal(verb, "", title="a problem"), state, words)
        self.poller.nudge()

    def _answered(self, answer: str, number: Any) -> None:
        """Handles a press of one of the dialog's buttons; `number` is the number of the question."""
        if number != self._form.question:  # a late click for a dialog that was closed already
            return
        proposal, was_open = self._asked, self.dialog.open
        self._asked = None
        self.dialog.open = False
        if answer == "confirm" and proposal is not None and was_open and self.may_act:
            process = asked_process(proposal, self.poller.result.snapshot)
            report = self._report(proposal, "waiting", f"waiting for {process}")
            self._start(lambda: self._act(proposal, report))

    def _act(self, proposal: Proposal, report: ActionReport) -> None:
        """Carries out the action and queues its outcome. Runs in a thread, and changes nothing on the page."""
        person = f"{self.visitor.name}, console"
        state, words = attempt(self.poller.rt, proposal, person, self.member)
        self._finished.put(report._replace(state=state, words=words, wall=self._wall()))
        self.poller.nudge()

    def _report(self, proposal: Proposal, state: str, words: str) -> ActionReport:
        action = f"{WORDS[proposal.verb].lower()} {proposal.title}".strip()
        number = next(self._numbers)
        report = ActionReport(number, self._wall(), action, state, words, proposal.target)
        self._reports = kept((*self._reports, report))
        self.update(None)
        return report

    def update(self, snapshot: Snapshot | None) -> None:
        """Shows the outcomes of finished actions, and the processes that do not answer according to `snapshot`."""
        while not self._finished.empty():
            finished = self._finished.get()
            self._reports = tuple(
                finished if report.number == finished.number else report for report in self._reports
            )
        now = self._wall()
        self._reports = kept(
            report
            for report in self._reports
            if now - report.wall < _SHOWN.get(report.state, float("inf"))
        )
        snapshot = snapshot or self.poller.result.snapshot
        lines = [_line(report, no_answer(report, snapshot)) for report in reversed(self._reports)]
        text = "".join(lines)
        if text != self.outcomes.object:
            self.outcomes.param.update(object=text, visible=bool(text))
            self.close.visible = any(report.state == "failed" for report in self._reports)

    def _close_failed(self) -> None:
        self._reports = tuple(report for report in self._reports if report.state != "failed")
        self.update(None)


_SHOWN = {"done": DONE_SECONDS, "failed": FAILED_SECONDS}


def kept(reports: Iterable[ActionReport]) -> tuple[ActionReport, ...]:
    """The newest of `reports`: at most MOST_REPORTS, and all in progress, whose outcomes must be shown later."""
    found = list(reports)
    finished = [report for report in found if report.state != "waiting"]
    too_many = max(0, len(found) - MOST_REPORTS)
    dropped = finished[:too_many]
    return tuple(report for report in found if report not in dropped)


def no_answer(report: ActionReport, snapshot: Snapshot | None) -> str:
    """Since when a process has not answered the request of `report`, as a sentence; empty if it has, or need not."""
    if snapshot is None or report.state != "waiting":
        return ""
    silent_since = [wait.since for wait in snapshot.unanswered if wait.ticket.name == report.target]
    if not silent_since:
        return ""
    since = clock(snapshot.wall - (snapshot.now - silent_since[0]))
    return (
        f"; no answer since {since}. The process is stopped or stuck, and keeps its memory until "
        "it answers or ends."
    )


def _line(report: ActionReport, silence: str = "") -> str:
    return (
        f'<div class="outcome {report.state}" role="status"><span>{clock(report.wall)}</span> '
        f"{SIGNS[report.state]} <b>{html.escape(clean(report.action))}</b>: "
        f"{html.escape(report.words + silence)}</div>"
    )
