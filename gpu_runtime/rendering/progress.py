"""Two lines about a load or a restore: its progress, and what stays after its end. Pure."""

from __future__ import annotations

from gpu_runtime.facts import KERNEL
from gpu_runtime.owner.arrivals import LOADING, Arrival
from gpu_runtime.units import show_bytes, show_rate, show_seconds

from . import text
from .elements import COLOURS, devices, esc, page, stretch, track
from .views import clean

STOP_IN_NOTEBOOK, STOP_IN_TERMINAL = "■ stops it", "Ctrl-C stops it"


def subject(name: str) -> str:
    """The model `name`, or the words for the memory of the notebook itself."""
    return "this notebook" if name == KERNEL else clean(name)


def running(arrival: Arrival, seconds: float, stop: str) -> str:
    """The line of an `arrival` after `seconds`: bar, bytes, rate, time left, and how to `stop` it."""
    title = f"{arrival.verb} {subject(arrival.name)}"
    filled = "█" * round(_part(arrival, seconds) * text.BAR_CELLS)
    return f"{title}  {filled:·<{text.BAR_CELLS}}  {note(arrival, seconds, stop)}"


def running_html(arrival: Arrival, seconds: float, stop: str) -> str:
    """The line of `running` as HTML, with a drawn bar."""
    title, words = f"{arrival.verb} {subject(arrival.name)}", esc(note(arrival, seconds, stop))
    part = _part(arrival, seconds)
    bar = track(stretch(part, COLOURS[2]) if part else "", note(arrival, seconds, stop))
    return page(devices([(f"<b>{esc(title)}</b>", bar, words, "")]))


def note(arrival: Arrival, seconds: float, stop: str) -> str:
    """The text after the bar: `6.0 GiB of 14.0 GiB · 2.1 GB/s · 4 s left · Ctrl-C stops it`."""
    size = show_bytes(arrival.all_bytes)
    if arrival.done_bytes:
        size = f"{show_bytes(arrival.done_bytes)} of {size}"
    left = seconds_left(arrival, seconds)
    figures = (
        size,
        show_rate(arrival.done_bytes, seconds),
        "" if left is None else f"{show_seconds(max(1.0, left))} left",
        stop,
    )
    return " · ".join(figure for figure in figures if figure)


def seconds_left(arrival: Arrival, seconds: float) -> float | None:
    """The seconds until the `arrival` ends, which began `seconds` ago; None if they are unknown.

    A restore does not report its bytes: it is expected to take as long as the model's last restore.
    """
    if arrival.done_bytes:
        left_bytes = max(0, arrival.all_bytes - arrival.done_bytes)
        return left_bytes * seconds / arrival.done_bytes
    left = arrival.expected_seconds - seconds
    return left if left > 0 else None


def _part(arrival: Arrival, seconds: float) -> float:
    """The part of the `arrival` that is done, from 0 to 1. An estimate from time is at most 0.95."""
    if arrival.done_bytes and arrival.all_bytes:
        return min(1.0, arrival.done_bytes / arrival.all_bytes)
    return min(0.95, seconds / arrival.expected_seconds) if arrival.expected_seconds else 0.0


def summary(arrival: Arrival, waited_seconds: float) -> str:
    """The line that stays after the `arrival`: `qwen: waited 12 s, loaded in 20 s (2.1 GB/s)`."""
    waited = f"waited {show_seconds(waited_seconds)}, " if waited_seconds else ""
    took = show_seconds(arrival.seconds)
    if arrival.failed:
        return f"{subject(arrival.name)}: {waited}{arrival.verb} stopped after {took}"
    done = "loaded" if arrival.verb == LOADING else "restored"
    rate = show_rate(arrival.all_bytes, arrival.seconds)
    figures = f" ({rate})" if rate else ""
    return f"{subject(arrival.name)}: {waited}{done} in {took}{figures}"
