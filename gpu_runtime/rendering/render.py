"""Wraps the result of a verb, so that Jupyter shows it as HTML and a terminal as text. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_runtime.facts import Applied, Health, Outcome, Plan, Replayed, Schedule, Snapshot
from gpu_runtime.owner.doctor import Report
from gpu_runtime.safe_text import lines

from . import allocator_map, elements, fleet, html, tables, text

EMPTY = {
    "models": "No model is registered yet. Load one:  %gpu load NAME PATH",
    "catalog": "The catalogue is empty. Add models:  {prompt} apply -f FILE",
    "leases": "No process holds memory on a device. Load a model:  %gpu load NAME PATH",
    "evictions": "Nothing has been evicted yet. What else happened:  {prompt} evictions --all",
    "fragmentation": "No process holds memory on a card yet. Load a model:  %gpu load NAME PATH",
}


class Shown:
    """A value with the functions that make its text and its HTML, and the attributes of the value."""

    def __init__(
        self, value: Any, text_of: Callable[[Any], str], html_of: Callable[[Any], str]
    ) -> None:
        """Displays the `value` by these functions, which are called only when it is displayed."""
        self.value = value
        self._text_of, self._html_of = text_of, html_of

    def __getattr__(self, name: str) -> Any:
        # A display hook looks for private methods. It must not find the private methods of the value.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __iter__(self) -> Any:
        return iter(self.value)

    def __repr__(self) -> str:
        return lines(self._text_of(self.value))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self), "text/html": self._html_of(self.value)}


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
    """The `value` that a `verb` returned, wrapped with its text and its HTML. A DataFrame is unchanged.

    `subject` is the text that was typed after the verb. `around` is the snapshot of the host at the
    time of the verb. Commands in the text begin with `prompt`.
    """
    if isinstance(value, str):
        return note(value)
    if isinstance(value, allocator_map.Mapped) and not value.maps:
        return hint(nothing("fragmentation", prompt))
    if isinstance(value, Plan) and around is not None:
        text_of = partial(text.plan, snapshot=around, prompt=prompt)
        return Shown(value, text_of, partial(html.plan, snapshot=around))
    if isinstance(value, Snapshot):
        return Shown(value, partial(text.status, prompt=prompt), html.status)
    for kind, functions in _BY_TYPE.items():
        if isinstance(value, kind):
            return Shown(value, *functions)
    if verb == "status" and isinstance(value, tuple):  # one snapshot for each host
        return Shown(
            value,
            lambda hosts: "\n\n".join(text.host(host, prompt) for host in hosts),
            lambda hosts: "".join(map(html.host, hosts)),
        )
    if verb == "fleet" and isinstance(value, tuple):
        return Shown(value, fleet.as_text, fleet.as_html)
    if verb == "why" and value and isinstance(value[0], Replayed):
        return Shown(value, text.replays, html.replays)
    if verb == "why":
        return Shown(
            value,
            lambda events: text.why(subject, events, prompt, around),
            lambda events: html.why(subject, events, around),
        )
    if verb == "config" and isinstance(value, dict):
        return Shown(value, text.preset, html.preset)
    if verb == "config":
        return Shown(value, text.config, html.config)
    return value


_BY_TYPE: dict[type, tuple[Callable[[Any], str], Callable[[Any], str]]] = {
    Health: (text.health, html.health),
    Outcome: (text.outcome, html.outcome),
    Schedule: (tables.schedule_text, tables.schedule_html),
    Applied: (text.applied, html.applied),
    allocator_map.Mapped: (allocator_map.as_text, allocator_map.as_html),
    Report: (lambda report: report.text, lambda report: elements.page(elements.pre(report.text))),
}


def with_titles(verb: str, value: Any, rt: Any) -> Any:
    """The `value` of a `verb` with the titles of maps from `rt`, and with tables in units for people."""
    if verb == "who":
        return tables.who(value)
    if is_frame(value):
        return tables.for_people(value)
    if verb == "fragmentation" and isinstance(value, tuple):
        return allocator_map.mapped(value, rt.status())
    return value


def block_report(block: Any) -> Shown:
    """A report on `block`, a leased block of code: its peak memory, and its memory at the end."""
    return Shown(
        block,
        text.block,
        lambda used: elements.page(elements.line(elements.esc(text.block(used)), soft=True)),
    )


def nothing(verb: str, prompt: str = "%gpu") -> str:
    """The sentence to show if the table of `verb` is empty. Its command begins with `prompt`."""
    return EMPTY.get(verb, "There is nothing to show.").format(prompt=prompt)


def note(words: str) -> Shown:
    """The `words`, unchanged, in a fixed-width font."""
    return Shown(words, str, lambda words: elements.page(elements.pre(words)))


def hint(sentence: str) -> Shown:
    """A `sentence` that ends with a command to type."""
    return Shown(sentence, str, lambda line: elements.page(elements.line(elements.with_code(line))))


def is_frame(value: Any) -> bool:
    """Whether the `value` is a DataFrame. The check does not import pandas."""
    return hasattr(value, "to_dict") and hasattr(value, "columns")


def frame_text(frame: Any) -> str:
    """The DataFrame `frame` as an aligned table for people."""
    owners = frame.attrs.get("owners")
    return text.frame(frame.to_dict("records"), list(frame.columns), owners)
