"""The rows of the queue on the tab Now, of the requests to other processes, and of the strip of problems."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_runtime.facts import Problem, Snapshot, Ticket, Unanswered, problems
from gpu_runtime.rendering.views import clean, clock

from .cells import (
    NO_ANSWER,
    NOTHING,
    UNKNOWN,
    Button,
    Cell,
    Column,
    Row,
    bytes_cell,
    holder_cell,
    importance_cell,
    lasting,
    waited_cell,
    why_no_answer,
)
from .confirmations import VERBS, ticket_title

ASLEEP_SECONDS = 2.0  # a request that was not refreshed for longer is overtaken by others

QUEUE = (
    Column("#", True, "Place in the queue"),
    Column("Request"),
    Column("For"),
    Column("Needs", True),
    Column("Waiting", True),
    Column("Importance"),
    Column("Waits for"),
)


def queue(snapshot: Snapshot) -> tuple[Row, ...]:
    """The requests that wait for memory, in the order of the queue, then the requests to other processes."""
    silent: dict[str, list[Unanswered]] = {}
    for one in snapshot.unanswered:
        silent.setdefault(one.ticket.key, []).append(one)
    waiting = [ticket for ticket in snapshot.tickets if ticket.verb == "use"]
    asked = [ticket for ticket in snapshot.tickets if ticket.verb != "use"]
    rows = [
        _waiting_row(ticket, position, snapshot, silent.get(ticket.key, []))
        for position, ticket in enumerate(waiting, 1)
    ]
    rows += [_asked_row(ticket, snapshot, silent.get(ticket.key, [])) for ticket in asked]
    return tuple(rows)


def _no_answer_since(silent: Sequence[Unanswered], snapshot: Snapshot) -> str:
    """A sentence such as `No answer since 12:03:11 from train.ipynb (pid 7).`"""
    names = " and ".join(holder_cell(one.owner.id, snapshot).text for one in silent)
    longest = snapshot.now - min(one.since for one in silent)
    return f"No answer since {clock(snapshot.wall - longest)} from {names}."


def _waiting_row(
    ticket: Ticket, position: int, snapshot: Snapshot, silent: Sequence[Unanswered]
) -> Row:
    because = clean(ticket.because) or "free memory"
    unrefreshed = snapshot.now - ticket.refreshed
    if unrefreshed > ASLEEP_SECONDS:
        stopped = f"Its process has been stopped for {lasting(unrefreshed)}"
        because = f"{stopped}; other requests overtake it. {because}"
    elif silent:
        because = f"{_no_answer_since(silent, snapshot)} {because}"
    cells = (
        Cell(str(position), position),
        Cell(ticket_title(ticket, snapshot), kind="strong"),
        holder_cell(ticket.owner, snapshot),
        Cell(ticket.need_text, ticket.need_bytes) if ticket.need else UNKNOWN,
        waited_cell(ticket.arrived, snapshot),
        importance_cell(ticket.importance),
        Cell(because, kind="prose alarm" if silent else "prose"),
    )
    return Row(ticket.key, cells, (end_wait(ticket, snapshot),))


def end_wait(ticket: Ticket, snapshot: Snapshot) -> Button:
    """The button that ends the wait of `ticket`, disabled if its process is stopped."""
    is_asleep = snapshot.now - ticket.refreshed > ASLEEP_SECONDS
    why_not = "Its process is stopped, and cannot end its wait" if is_asleep else ""
    return Button("cancel", VERBS["cancel"], why_not)


def _asked_row(ticket: Ticket, snapshot: Snapshot, silent: Sequence[Unanswered]) -> Row:
    """The row of a request that waits for the answer of another process, such as an eviction."""
    owner_id, _, name = ticket.name.partition("/")
    title = snapshot.title(owner_id, name)
    cells = (
        NOTHING,
        Cell(f"{ticket.verb} {clean(title)}".rstrip(), kind="strong"),
        holder_cell(ticket.owner, snapshot),
        NOTHING,
        waited_cell(ticket.arrived, snapshot),
        NOTHING,
        _answer_cell(ticket, owner_id, snapshot, silent),
    )
    return Row(ticket.key, cells)


def _answer_cell(
    ticket: Ticket, owner_id: str, snapshot: Snapshot, silent: Sequence[Unanswered]
) -> Cell:
    person = clean(ticket.said_by)
    if silent:
        requested = f" Requested by {person}." if person else ""
        text = f"{_no_answer_since(silent, snapshot)}{requested}"
        return Cell(text, hint=f"{NO_ANSWER}.", kind="prose alarm")
    requested = f", requested by {person}" if person else ""
    return Cell(f"an answer from {holder_cell(owner_id, snapshot).text}{requested}", kind="prose")


PROBLEMS = (Column("Problem"), Column("Since"), Column("Memory", True))

NO_PROBLEMS = "No problems"
# Between two snapshots; after a longer gap, the beginning of a new problem is unknown
GAP_SECONDS = 10.0


class Since(NamedTuple):
    """The beginning of a problem."""

    wall: float  # epoch seconds
    is_before: bool  # whether it began at an unknown time before `wall`


class FirstSeen:
    """When each problem was first seen, for problems whose beginning the snapshot does not give.

    If no snapshot was read for a while before, a problem may have begun long before: its time has `is_before`.
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
    """A row for each problem in `snapshot`. `first_seen` is updated."""
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
    """The button for `verb` on a lease, a waiting request or a process. It sends `VERB TARGET`; see `pressed`."""
    if verb == "resume":
        return Button(f"{verb} {target}", VERBS[verb])
    if verb == "cancel":
        ticket = next(one for one in snapshot.tickets if one.key == target)
        return end_wait(ticket, snapshot)._replace(verb=f"{verb} {target}")
    owner_id, _, name = target.partition("/")
    title = snapshot.title(owner_id, name)
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
