"""The variables of one notebook on the tab Leases, shown as a table and sums like the result of `%gpu who`."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpu_runtime.rendering import tables
from gpu_runtime.rendering.elements import esc
from gpu_runtime.rendering.views import clean
from gpu_runtime.units import show_bytes

from .cells import Cell, Column, Row

HOLDERS = (
    Column("Name", hint="A variable, an output, an error, a thread or a model"),
    Column("Kind"),
    Column("Device"),
    Column("Holds", True, "Bytes of everything that the name refers to"),
    Column("Frees", True, "Bytes that come free if this name alone is deleted"),
    Column("Cell", hint="The cell that assigned it"),
    Column("What"),
)


class Variables(NamedTuple):
    """The answer of a process to the request for its variables.

    Until the process has answered, `frame` is None and `trouble` is empty.
    """

    owner: str  # the id of the process
    label: str
    frame: Any = None  # the DataFrame of `rt.who`
    trouble: str = ""  # why there is no answer


def heading(answer: Variables) -> str:
    """The line of HTML above the table of variables."""
    state = "" if answer.frame is not None or answer.trouble else "asking …"
    return (
        f'<div class="head"><span class="name">Variables of {esc(clean(answer.label))}</span>'
        f'<span class="soft">{state}</span></div>'
    )


def holders(answer: Variables) -> tuple[Row, ...]:
    """A row for each name that holds memory. If there is no answer yet, there are no rows."""
    if answer.frame is None:
        return ()
    records = answer.frame.to_dict("records")
    return tuple(Row(f"{number}", _cells(record)) for number, record in enumerate(records))


def _cells(record: dict[str, Any]) -> tuple[Cell, ...]:
    size, alone = int(record["bytes"]), int(record["alone_bytes"])
    return (
        Cell(clean(record["name"]), kind="strong"),
        Cell(record["kind"]),
        Cell(record["device"]),
        Cell(show_bytes(size), size),
        Cell(show_bytes(alone), alone),
        Cell(clean(record["cell"]), kind="soft"),
        Cell(tables.what(record), kind="soft"),
    )


def sums(answer: Variables) -> str:
    """The sentences below the table of variables, as HTML.

    The sentences state how many bytes the names in the table hold, or why there is no table.
    """
    if answer.trouble:
        return f'<div class="alarm">{esc(answer.trouble)}</div>'
    if answer.frame is None:
        return ""
    known = {**answer.frame.attrs, "process": ""}  # the heading names the process already
    return "".join(f'<div class="soft">{esc(line)}</div>' for line in tables.sentences(known))
