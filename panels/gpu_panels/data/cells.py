"""The parts of a table as plain values: columns, rows, cells and buttons; and the cells that several tables share.

The shown durations change in steps of five seconds. So a table of idle models changes twelve times a minute instead
of sixty times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from gpu_runtime.facts import (
    ASLEEP,
    THIS_PROCESS,
    Lease,
    Owner,
    ProcessState,
    Section,
    Snapshot,
    cards_label,
    holder_label,
    importance_name,
    lease_state,
)
from gpu_runtime.rendering import views
from gpu_runtime.rendering.text import shorten
from gpu_runtime.rendering.views import clock, holder
from gpu_runtime.safe_text import clean
from gpu_runtime.units import show_bytes, show_seconds

from .. import palette


class Cell(NamedTuple):
    """One cell. Its text is data, which the browser shows and never parses as HTML."""

    text: str
    value: float | None = None  # sort key; None: the cell is sorted by its text
    hint: str = ""  # shown on hover
    # The kind is one of: strong, soft, alarm, prose (wrapped), short (wrapped early), time (epoch
    # seconds).
    kind: str = ""
    colour: str = ""  # colour of a square before the text; empty: no square
    texture: str = ""  # texture of that square, one of palette.TEXTURES


class Button(NamedTuple):
    """A button in a row."""

    verb: str
    label: str
    why_not: str = ""  # why the button cannot be pressed now; empty if it can


class Row(NamedTuple):
    """One row of a table, with the id of the object that the row shows."""

    id: str
    cells: tuple[Cell, ...]
    buttons: tuple[Button, ...] = ()


class Column(NamedTuple):
    """One column: its title, whether it has numbers, and the explanation that its header shows."""

    title: str
    numeric: bool = False
    hint: str = ""


def encoded(rows: Iterable[Row], buttons: bool = True) -> str:
    """The `rows` as JSON for the browser. `buttons` is False for a viewer, who may not act."""
    return as_json([row if buttons else row._replace(buttons=()) for row in rows])


def as_json(value: Any) -> str:
    """The `value` as JSON for the browser."""
    return msgspec.json.encode(value).decode()


LONGEST = 40  # characters of a name in a cell or a bar; its tooltip has all of it
UNKNOWN = Cell("unknown", None, kind="soft")
NOTHING = Cell("–", None, kind="soft")
SLEEPS = "Its engine runs on, with the weights in RAM. They return to the card at its next use"
NO_ANSWER = (
    "The process is stopped, or its interpreter is blocked. It acts on the request when it runs "
    "again"
)


def place(lease: Lease) -> str:
    """Where `lease` is: `cuda:0`, `cuda:0,1 (TP:2)`, `RAM` or `disk`. For a lease in parts, the bytes in each place."""
    _, bracket, degree = cards_label(lease.shares or lease.target, lease.backend).partition(" (")
    return f"{views.place(lease)}{bracket}{degree}"


def state_cell(lease: Lease, now: float) -> Cell:
    """The state of `lease` without its idle time, which has its own column."""
    state = lease_state(lease, now)
    if state.activity == "in use":
        return Cell(state.text(lasting, least_seconds=5.0), state.seconds, kind="strong")
    hint = SLEEPS if state.away == ASLEEP else ""
    return Cell(state.word, hint=hint, kind="soft" if state.activity == "never used" else "")


def if_awake(
    buttons: Iterable[Button], owner_id: str, snapshot: Snapshot, lease_id: str = ""
) -> tuple[Button, ...]:
    """The `buttons` of the process with the id `owner_id`. They are disabled if the process cannot act on a request.

    A button that evicts or parks the lease `lease_id` is disabled, too, if the lease would stay.
    """
    asleep, stays = why_no_answer(snapshot, owner_id), snapshot.stays.get(lease_id, "")
    leaves = ("evict", "park")
    return tuple(
        offer._replace(why_not=asleep or offer.why_not or (stays if offer.verb in leaves else ""))
        for offer in buttons
    )


def short(name: str) -> str:
    """The `name` with at most LONGEST characters. A longer name loses its middle, since both ends tell names apart."""
    return shorten(clean(name), LONGEST)


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key for `name`. Numbers in the name are compared by their value.

    >>> sorted(["bge-10", "bge-2", "Ada"], key=natural)
    ['Ada', 'bge-2', 'bge-10']
    """
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part.casefold())
        for part in re.split(r"(\d+)", name)
    ]


def lasting(seconds: float) -> str:
    """The duration `seconds` in words, in steps that a person can follow.

    >>> lasting(3), lasting(58), lasting(130), lasting(7300)
    ('< 5 s', '55 s', '2 min', '2 h')
    """
    return "< 5 s" if seconds < 5 else show_seconds(stepped(seconds))


def stepped(seconds: float) -> float:
    """The `seconds` rounded down to a multiple of five. From two minutes on, they are rounded down to full minutes."""
    step = 5 if seconds < 120 else 60
    return max(0.0, seconds - seconds % step)


def notebook_cell(owner: Owner, snapshot: Snapshot) -> Cell:
    """The file name of the `owner`'s notebook, with its path on hover; the pid of a process without one."""
    if owner.notebook:
        return Cell(short(owner.title), None, clean(owner.notebook))
    is_this_process = owner.id == snapshot.owner.id
    return Cell(owner.name, None, THIS_PROCESS if is_this_process else "no notebook")


def owner_cell(owner: Owner, snapshot: Snapshot) -> Cell:
    """The label of the process `owner`, with its user if another user's process read the `snapshot`."""
    hint = f"{owner.notebook or 'no notebook'}, pid {owner.pid}, {owner.user}"
    return Cell(short(holder_label(owner, snapshot.owner)), None, clean(hint))


def holder_cell(owner_id: str, snapshot: Snapshot) -> Cell:
    """A cell with the label of the process `owner_id`, even if the process is no longer in `snapshot`."""
    section = snapshot.sections.get(owner_id)
    if section is not None:
        return owner_cell(section.owner, snapshot)
    return Cell(short(holder(snapshot, owner_id)))


def lease_name_cell(lease: Lease, hint: str, styles: Mapping[str, palette.LeaseStyle]) -> Cell:
    """The name of `lease` with its swatch from `styles`. The text `hint` is shown on hover."""
    style = styles.get(palette.label_of(lease.owner, lease.name))
    colour, texture = (style.colour, style.texture) if style else ("", "")
    name = clean(lease.name)
    whole = f"{name}; {hint}" if hint else name
    return Cell(
        short(name), None, whole if len(name) > LONGEST else hint, "strong", colour, texture
    )


def importance_cell(importance: int) -> Cell:
    """A cell with the name of the `importance`. The table sorts such cells by their numbers."""
    return Cell(importance_name(importance), importance)


def bytes_cell(size: int | None, otherwise: Cell) -> Cell:
    """The `size` in bytes, or the cell `otherwise` if `size` is None."""
    return otherwise if size is None else Cell(show_bytes(size), size)


def waited_cell(arrived: float, snapshot: Snapshot) -> Cell:
    """How long a request has waited since `arrived`. On hover, it shows the time of day at which the wait began."""
    waited = max(0.0, snapshot.now - arrived)
    return Cell(lasting(waited), stepped(waited), f"since {clock(snapshot.wall - waited)}")


def lease_styles(snapshot: Snapshot) -> Mapping[str, palette.LeaseStyle]:
    """The style of every lease in `snapshot` by its label. All charts use the same styles."""
    labels = [palette.label_of(lease.owner, lease.name) for lease in snapshot.leases()]
    return palette.SHARED.styles(labels)


def notebook_name(section: Section) -> str:
    """The name of the process of `section`: `train.ipynb`, or `pid 4121` if the process has no notebook."""
    return short(section.owner.name)


def process_name(section: Section) -> str:
    """The name of the process of `section`, such as `train.ipynb (pid 4121), ann`."""
    return clean(holder_label(section.owner))


def process_in_words(section: Section) -> str:
    """The process of `section` in a sentence, such as `train.ipynb (pid 4121) of ann`."""
    owner = section.owner
    return clean(
        f"{owner.label} of {owner.user}" if owner.pid and owner.user else process_name(section)
    )


def why_no_answer(snapshot: Snapshot, owner_id: str) -> str:
    """Why the process with the id `owner_id` cannot act on a request, as a sentence; empty if it can."""
    state = snapshot.state_of(owner_id)
    return _NO_ANSWER.get(state, "") if state else ""


_NO_ANSWER = {
    ProcessState.STOPPED: "Its process is stopped, and acts on no request until it is continued",
    ProcessState.DUMPING: "Its process has crashed, and writes its core dump",
}


def without_password(url: str) -> str:
    """The `url` without the user and the password that it may contain."""
    kind, slashes, rest = url.partition("://")
    return f"{kind}{slashes}{rest.rpartition('@')[2]}"


def ledger_title(url: str) -> str:
    """A short name of a ledger: its kind and the end of its path.

    >>> ledger_title("keeper:////var/lib/gpu-console/ledger"), ledger_title("redis://user:secret@box:6379/0")
    ('keeper …/gpu-console/ledger', 'redis box:6379/0')
    """
    kind, _, rest = without_password(url).partition("://")
    parts = rest.rstrip("/").split("/")
    if kind == "keeper" and len(parts) > 3:
        rest = f"…/{'/'.join(parts[-2:])}"
    return f"{kind.rstrip(':')} {rest}".strip()
