"""Labels for people: the state of a lease, its holder, and its cards; and the notebooks that people name.

Error messages and all user interfaces use these functions, so a lease has the same label everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import AmbiguousName
from ..units import show_bytes, show_seconds
from .base import HOST
from .book import Event
from .devices import Shares, where
from .engines import ENGINES
from .leases import Lease, LeaseId, Owner, Phase, Section

THIS_PROCESS = "this process"


class LeaseState(NamedTuple):
    """What a lease is doing."""

    activity: str  # "arriving", "leaving", "in use", "idle" or "never used"
    seconds: float = 0.0  # how long it has been in use, or idle; 0: not known
    # Of a settled, unused lease in host memory: `warm`, or `parked` if it is a notebook's own memory.
    away: str = ""

    @property
    def word(self) -> str:
        return self.away or self.activity

    def text(
        self, duration: Callable[[float], str] = show_seconds, least_seconds: float = 1.0
    ) -> str:
        """The state with its duration, such as `in use for 40 s` or `warm, idle 3 min`.

        `duration` writes the seconds as text. A use shorter than `least_seconds` is written without
        a time.

        >>> LeaseState("idle", 180.0, away="warm").text()
        'warm, idle 3 min'
        """
        text = self.activity
        if self.activity == "in use" and self.seconds >= least_seconds:
            text = f"in use for {duration(self.seconds)}"
        elif self.activity == "idle":
            text = f"idle {duration(self.seconds)}"
        return f"{self.away}, {text}" if self.away else text


def lease_state(lease: Lease, now: float) -> LeaseState:
    """The state of `lease` at the time `now`."""
    if lease.phase is not Phase.SETTLED:
        return LeaseState(lease.phase.value)
    if lease.pins:
        return LeaseState("in use", now - lease.pinned_since if lease.pinned_since else 0.0)
    away = ("parked" if lease.kind == "kernel" else "warm") if lease.on_host else ""
    if not lease.last_used:
        return LeaseState("never used", away=away)
    return LeaseState("idle", lease.idle_seconds(now), away=away)


def holder_label(owner: Owner, viewer: Owner | None = None) -> str:
    """The label of the process `owner`: `this process`, or `train.ipynb (pid 4121), ann`.

    Without a `viewer`, the process in which a person reads it, the label is the same for every reader. The viewer's own
    user is not named.
    """
    if viewer is not None and owner.id == viewer.id:
        return THIS_PROCESS
    if not owner.user or (viewer is not None and owner.user == viewer.user):
        return owner.label
    return f"{owner.label}, {owner.user}"


def ended_label(owner_id: str, notebook: str = "") -> str:
    """The label of a process that has left the book: `train.ipynb (pid 4121), ended`. Its id has its pid."""
    pid = f"pid {owner_id.partition('.')[0]}"
    return f"{notebook} ({pid}), ended" if notebook else f"{pid}, ended"


def notebooks_in(events: Iterable[Event]) -> dict[str, str]:
    """The file names of notebooks by their owner's id, from `events`."""
    return {event.owner: event.notebook.rpartition("/")[2] for event in events if event.notebook}


def cards_label(shares: Shares, backend: str = "") -> str:
    """The cards of `shares`: `GPU: 0` or `GPUs: 0,1 (TP:2)`; empty if no share is on a card.

    The degree of tensor parallelism (TP) is shown only if the engine of `backend` is tensor
    parallel.

    >>> from gpu_runtime.facts import Share
    >>> two = (Share("cuda:0", 1), Share("cuda:1", 1))
    >>> cards_label(two[:1]), cards_label(two), cards_label(two, "vllm")
    ('GPU: 0', 'GPUs: 0,1', 'GPUs: 0,1 (TP:2)')
    """
    cards = [share.device for share in shares if share.device != HOST]
    numbers = [device.partition(":")[2] or device for device in cards]
    if len(numbers) < 2:
        return f"GPU: {numbers[0]}" if numbers else ""
    is_parallel = backend in ENGINES and ENGINES[backend].tensor_parallel
    return f"GPUs: {','.join(numbers)}{f' (TP:{len(numbers)})' if is_parallel else ''}"


def place_label(lease: Lease) -> str:
    """The place of `lease`, such as `cuda:0`. For a lease in parts, the bytes on each device.

    >>> from gpu_runtime.facts import Share
    >>> parts = (Share("cuda:0", 24 * 2**30), Share("host", 16 * 2**30))
    >>> place_label(Lease("1", "big", shares=parts))
    '24.0 of 40.0 GiB on cuda:0, 16.0 GiB in RAM'
    """
    if not lease.in_parts:
        return lease.where
    in_ram = lease.bytes_on(HOST)
    here, whole = show_bytes(lease.bytes - in_ram), show_bytes(lease.bytes)
    number, _, unit = here.partition(" ")
    if whole.endswith(f" {unit}"):
        here = number
    cards = where(tuple(share for share in lease.shares if share.device != HOST))
    return f"{here} of {whole} on {cards}, {show_bytes(in_ram)} in RAM"


def bytes_label(lease: Lease) -> str:
    """The bytes and place of `lease`, such as `40.0 GiB on cuda:0`; see `place_label` for parts."""
    return place_label(lease) if lease.in_parts else f"{show_bytes(lease.bytes)} on {lease.where}"


def lease_title(lease: Lease, owner: Owner | None) -> str:
    """The name of `lease` for people. A kernel's own memory has the name of its notebook.

    >>> lease_title(Lease("1", "kernel", kind="kernel"), Owner("h", "b", 41, 0, notebook="a/train.ipynb"))
    'train.ipynb'
    """
    if lease.kind != "kernel" or owner is None:
        return lease.name
    return owner.file or f"pid {owner.pid}"


# The kinds of leases that are evicted. A block of code keeps its bytes until it ends.
EVICTED = ("model", "kernel")
# How a reason begins that keeps a notebook's memory for a moment only. Any other reason ends by an act of its user.
PASSING = ("a cell runs", "a thread runs", "the kernel was used meanwhile")


def notebook_has_name(path: str, name: str) -> bool:
    """Whether `name` is the file name or the path of the notebook at `path`. An empty path is no notebook.

    >>> names = ("train.ipynb", "/ann/train.ipynb", "rain.ipynb", "")
    >>> [notebook_has_name("/ann/train.ipynb", name) for name in names], notebook_has_name("", "")
    ([True, True, False, False], False)
    """
    return path != "" and name in (path, path.rpartition("/")[2])


def of_notebook(sections: Iterable[Section], name: str) -> list[Section]:
    """The kernels of the notebook with this file `name` or path. Raises AmbiguousName for several folders."""
    found = [section for section in sections if notebook_has_name(section.owner.notebook, name)]
    paths = tuple(sorted({section.owner.notebook for section in found}))
    if len(paths) > 1:
        raise AmbiguousName(name, paths)
    return found


def held_on_cards(sections: Iterable[Section]) -> list[LeaseId]:
    """The leases in `sections` that an eviction of the whole notebook moves off a card."""
    leases = [lease for section in sections for lease in section.leases]
    held = [lease for lease in leases if lease.kind in EVICTED and lease.on_device]
    return [LeaseId(lease.owner, lease.name) for lease in held]
