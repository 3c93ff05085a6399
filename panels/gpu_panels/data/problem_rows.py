"""The rows of the strip of problems. A row shows the problem, its beginning, and how much memory it concerns."""

from __future__ import annotations

from gpu_runtime.facts import Problem, Snapshot, lease_title, problems
from gpu_runtime.rendering.views import clean

from .cells import Button, Cell, Column, Row
from .confirmations import VERBS
from .row_parts import NOTHING, bytes_cell

PROBLEMS = (Column("Problem"), Column("Since"), Column("Memory", True))

NO_PROBLEMS = "No problems"


def problem_rows(snapshot: Snapshot, first_seen: dict[str, float]) -> tuple[Row, ...]:
    """A row for each problem in `snapshot`.

    `first_seen` maps the key of each problem to the epoch seconds at which a snapshot first had the problem. This
    function updates `first_seen`. If the beginning of a problem is unknown, the time in `first_seen` is shown.
    """
    found = problems(snapshot)
    keys = [problem.key for problem in found]
    for key in [key for key in first_seen if key not in keys]:
        del first_seen[key]
    for key in keys:
        first_seen.setdefault(key, snapshot.wall)
    return tuple(_row(problem, snapshot, first_seen[problem.key]) for problem in found)


def _row(problem: Problem, snapshot: Snapshot, seen_wall: float) -> Row:
    cells = (
        Cell(clean(problem.text), kind="prose alarm"),
        Cell("", problem.wall or seen_wall, kind="time"),
        bytes_cell(problem.bytes or None, NOTHING),
    )
    buttons = [_button(verb, target, snapshot) for verb, target in problem.actions]
    return Row(problem.key, cells, tuple(buttons))


def _button(verb: str, target: str, snapshot: Snapshot) -> Button:
    """The button for `verb` on the lease or the waiting request `target`.

    A press of the button sends the text `VERB TARGET`, which `pressed` reads.
    """
    if verb == "cancel":
        return Button(f"{verb} {target}", VERBS[verb])
    owner_id, _, name = target.partition("/")
    section = snapshot.sections.get(owner_id)
    lease = section.lease(name) if section else None
    title = lease_title(lease, section.owner) if lease and section else name
    return Button(f"{verb} {target}", f"{VERBS[verb]} {clean(title)}")


def pressed(button: str) -> tuple[str, str]:
    """The verb and the target of a pressed `button`. `button` is a text from a browser and can be anything."""
    verb, _, target = button.partition(" ")
    return verb, target


def summary(snapshot: Snapshot) -> str:
    """The number of problems in words: `No problems`, or `2 problems`."""
    count = len(problems(snapshot))
    return f"{count} problem{'s' if count != 1 else ''}" if count else NO_PROBLEMS
