"""Wraps the result of a verb in an object that Jupyter shows as HTML and a terminal as text.

This module is pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gpu_runtime.facts import Applied, Health, Outcome, Plan, Replayed, Schedule, Snapshot
from gpu_runtime.owner.doctor import Report
from gpu_runtime.safe_text import lines

from . import allocator_map, elements, fleet, frames, holders, html, schedule, text

EMPTY = {
    "models": "No model is registered yet. Load one:  %gpu load NAME PATH",
    "catalog": "The catalogue is empty. Add models:  {prompt} apply -f FILE",
    "leases": "No process holds memory on a device. Load a model:  %gpu load NAME PATH",
    "evictions": "Nothing has been evicted yet. What else happened:  {prompt} evictions --all",
    "fragmentation": "No process holds memory on a card yet. Load a model:  %gpu load NAME PATH",
}


class Shown:
    """A value with the functions that make its text and its HTML.

    The attributes of the value are also attributes of this object: `(%gpu plan qwen).granted`.
    """

    def __init__(self, value: Any, as_text: Callable[[], str], as_html: Callable[[], str]) -> None:
        """Displays the `value` by `as_text` and `as_html`, which are called only when it is
        displayed.
        """
        self.value = value
        self._text, self._html = lambda: lines(as_text()), as_html

    def __getattr__(self, name: str) -> Any:
        # A display hook looks for private methods. It must not find the private methods of the value.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __iter__(self) -> Any:
        return iter(self.value)

    def __repr__(self) -> str:
        return self._text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": self._text(), "text/html": self._html()}


class Json(str):
    """JSON text that a frontend can show as a tree."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": str(self), "application/json": json.loads(self)}


def shown(
    verb: str,
    value: Any,
    *,
    subject: str = "",
    around: Snapshot | None = None,
    prompt: str = "%gpu",
) -> Any:
    """The `value` that a `verb` returned, wrapped with its text and its HTML.

    `subject` is the text that was typed after the verb. `around` is the snapshot of the host at the
    time of the verb. Commands in the text begin with `prompt`. A DataFrame has its own display and
    is returned unchanged.
    """
    if isinstance(value, Plan) and around is not None:
        return Shown(
            value,
            lambda: text.plan(value, around, prompt),
            lambda: html.plan(value, around),
        )
    by_type = _shown_by_type(value, prompt)
    return by_type if by_type is not None else _shown_by_verb(verb, value, subject, prompt, around)


def _shown_by_type(value: Any, prompt: str) -> Shown | None:
    """The `value` with its text and HTML, if its type alone decides how it is displayed. If not,
    None.
    """
    if isinstance(value, Snapshot):
        return Shown(value, lambda: text.status(value, prompt), lambda: html.status(value))
    if isinstance(value, Health):
        return Shown(value, lambda: text.health(value), lambda: html.health(value))
    if isinstance(value, Outcome):
        return Shown(value, lambda: text.outcome(value), lambda: html.outcome(value))
    if isinstance(value, Schedule):
        return Shown(value, lambda: schedule.as_text(value), lambda: schedule.as_html(value))
    if isinstance(value, Applied):
        return Shown(value, lambda: text.applied(value), lambda: html.applied(value))
    if isinstance(value, allocator_map.Mapped):
        return _maps(value, prompt)
    if isinstance(value, Report):
        return Shown(value, lambda: value.text, lambda: elements.page(elements.pre(value.text)))
    if isinstance(value, str):
        return note(value)
    return None


def _shown_by_verb(
    verb: str, value: Any, subject: str, prompt: str, around: Snapshot | None
) -> Any:
    if verb == "status" and isinstance(value, tuple):  # one snapshot for each host
        return Shown(
            value,
            lambda: "\n\n".join(text.host(one, prompt) for one in value),
            lambda: "".join(html.host(one) for one in value),
        )
    if verb == "fleet" and isinstance(value, tuple):
        return Shown(value, lambda: fleet.as_text(value), lambda: fleet.as_html(value))
    if verb == "why" and value and isinstance(value[0], Replayed):
        return Shown(value, lambda: text.replays(value), lambda: html.replays(value))
    if verb == "why":
        return Shown(
            value,
            lambda: text.why(subject, value, prompt, around),
            lambda: html.why(subject, value, around),
        )
    if verb == "config" and isinstance(value, dict):
        return Shown(value, lambda: text.preset(value), lambda: html.preset(value))
    if verb == "config":
        return Shown(value, lambda: text.config(value), lambda: html.config(value))
    return value


def with_titles(verb: str, value: Any, rt: Any) -> Any:
    """The `value` that a `verb` returned, prepared for display.

    Allocator maps get their titles from `rt`. DataFrames show sizes and times for people.
    """
    if verb == "who":
        return holders.table(value)
    if is_frame(value):
        return frames.for_people(value)
    if verb == "fragmentation" and isinstance(value, tuple):
        return allocator_map.mapped(value, rt.status())
    return value


def _maps(value: allocator_map.Mapped, prompt: str) -> Shown:
    if not value.maps:
        return hint(nothing("fragmentation", prompt))
    pairs = list(zip(value.maps, value.titles, strict=True))
    return Shown(
        value,
        lambda: "\n\n".join(allocator_map.as_text(map, title) for map, title in pairs),
        lambda: "".join(allocator_map.as_html(map, title) for map, title in pairs),
    )


def block_report(block: Any) -> Shown:
    """A report on `block`, a leased block of code: its peak memory, and its memory at the end."""
    return Shown(
        block,
        lambda: text.block(block),
        lambda: elements.page(elements.line(elements.esc(text.block(block)), soft=True)),
    )


def nothing(verb: str, prompt: str = "%gpu") -> str:
    """The sentence to show if the table of `verb` is empty. Its command begins with `prompt`."""
    return EMPTY.get(verb, "There is nothing to show.").format(prompt=prompt)


def note(words: str) -> Shown:
    """The `words`, unchanged, in a fixed-width font."""
    return Shown(words, lambda: words, lambda: elements.page(elements.pre(words)))


def hint(sentence: str) -> Shown:
    """A `sentence` that ends with a command to type."""
    return Shown(
        sentence,
        lambda: sentence,
        lambda: elements.page(elements.line(elements.with_code(sentence))),
    )


def is_frame(value: Any) -> bool:
    """Whether the `value` is a DataFrame. The check does not import pandas."""
    return hasattr(value, "to_dict") and hasattr(value, "columns")


def frame_text(frame: Any) -> str:
    """The DataFrame `frame` as an aligned table for people."""
    owners = frame.attrs.get("owners")
    return text.frame(frame.to_dict("records"), list(frame.columns), owners)
