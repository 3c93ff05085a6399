"""The rows of the strip of problems. A row shows the problem, its beginning, and how much memory it concerns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpu_runtime.facts import Problem, Snapshot, lease_title, problems
from gpu_runtime.rendering.views import clean

from .cells import Button, Cell, Column, Row
from .confirmations import VERBS
from .queue_rows import end_wait
from .row_parts import NOTHING, bytes_cell, why_no_answer

PROBLEMS = (Column("Problem"), Column("Since"), Column("Memory", True))

NO_PROBLEMS = "No problems"
GAP_SECONDS = (
    10.0  # between two snapshots; after a longer gap, the beginning of a new problem is unknown
)


class Since(NamedTuple):
    """The beginning of a problem."""

    wall: float  # epoch seconds
    is_before: bool  # whether it began at an unknown time before `wall`


class FirstSeen:
    """When each problem was first seen. These times are shown if the snapshot does not give a problem's beginning.

    If no snapshot was read for a while before, a problem may have begun long before it was first seen. Its time is then
    marked with `is_before`.
    """

    def __init__(self) -> None:
        self.times: dict[str, Since] = {}  # by the key of the problem
        self._read_wall = float("-inf")  # of the last snapshot, in epoch seconds

    def update(self, keys: Iterable[str], wall: float) -> None:
        """Adds new problems with these `keys`, seen at `wall` (epoch seconds), and removes ended ones."""
        now = Since(wall, wall - self._read_wall > GAP_SECONDS)
        self.times = {key: self.times.get(key, now) for key in keys}
        self._read_wall = wall


def problem_rows(snapshot: Snapshot, first_seen: FirstSeen) -> tuple[Row, ...]:
    """A row for each problem in `snapshot`. `first_seen` has the times of earlier snapshots, and is updated."""
    found = problems(snapshot)
    first_seen.update([problem.key for problem in found], snapshot.wall)
    return tuple(_row(problem, snapshot, first_seen.times[problem.key]) for problem in found)


def _row(problem: Problem, snapshot: Snapshot, seen: Since) -> Row:
    since = Since(problem.wall, False) if problem.wall else seen
    cells = (
        Cell(clean(problem.text), kind="prose alarm"),
        Cell("before" if since.is_before else "", since.wall, kind="time"),
        bytes_cell(problem.bytes or None, NOTHING),
    )
    buttons = [_button(verb, target, snapshot) for verb, target in problem.actions]
    return Row(problem.key, cells, tuple(buttons))


def _button(verb: str, target: str, snapshot: Snapshot) -> Button:
    """The button for `verb` on the lease, the waiting request or the process `target`.

    A press of the button sends the text `VERB TARGET`, which `pressed` reads.
    """
    if verb == "resume":
        return Button(f"{verb} {target}", VERBS[verb])
    if verb == "cancel":
        ticket = next(one for one in snapshot.tickets if one.key == target)
        return end_wait(ticket, snapshot)._replace(verb=f"{verb} {target}")
    owner_id, _, name = target.partition("/")
    section = snapshot.sections.get(owner_id)
    lease = section.lease(name) if section else None
    title = lease_title(lease, section.owner) if lease and section else name
    why_not = why_no_answer(snapshot, owner_id)
    return Button(f"{verb} {target}", f"{VERBS[verb]} {clean(title)}", why_not)


def pressed(button: str) -> tuple[str, str]:
    """The verb and the target of a pressed `button`. `button` is a text from a browser and can be anything."""
    verb, _, target = button.partition(" ")
    return verb, target


def summary(snapshot: Snapshot) -> str:
    """The number of problems in words: `No problems`, or `2 problems`."""
    count = len(problems(snapshot))
    return f"{count} problem{'s' if count != 1 else ''}" if count else NO_PROBLEMS
