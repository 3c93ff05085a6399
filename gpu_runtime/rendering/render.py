"""Answers that render themselves: text everywhere, HTML where there is a browser, JSON where it was asked for.

Pure: an answer goes in, an object comes out that Jupyter, a terminal or a program can show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from gpu_runtime.facts import Applied, Health, Outcome, Plan, Snapshot
from gpu_runtime.owner.doctor import Report

from . import allocator_map, html, text

EMPTY = {
    "models": "No model is registered yet. Load one:  %gpu load NAME PATH",
    "catalog": "The catalogue is empty. Add models:  {prompt} apply -f FILE",
    "leases": "Nobody holds memory on a device. Load a model:  %gpu load NAME PATH",
    "evictions": "Nothing has been evicted yet. What else happened:  {prompt} evictions --all",
    "fragmentation": "No process holds memory on a card yet. Load a model:  %gpu load NAME PATH",
}


class Shown:
    """A value with its text and its HTML. Its attributes are the value's own: `(%gpu plan qwen).granted`."""

    def __init__(self, value: Any, as_text: Callable[[], str], as_html: Callable[[], str]) -> None:
        self.value = value
        self._text, self._html = as_text, as_html

    def __getattr__(self, name: str) -> Any:
        if name.startswith(
            "_"
        ):  # a display hook that looks for its own method must not find the value's
            raise AttributeError(name)
        return getattr(self.value, name)

    def __iter__(self) -> Any:
        return iter(self.value)

    def __repr__(self) -> str:
        return self._text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": self._text(), "text/html": self._html()}


def block_report(block: Any) -> Shown:
    """What a cell took at its peak, and what it left behind."""
    return Shown(
        block,
        lambda: text.block(block),
        lambda: html.page(html.line(html.esc(text.block(block)), soft=True)),
    )


class Json(str):
    """JSON text that also shows as a tree where the frontend can."""

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
    """The answer to a verb as it is shown. `subject` is what was asked about, `around` how things stood then.

    A DataFrame shows itself and comes back as it is.
    """
    if isinstance(value, Snapshot):
        return Shown(value, lambda: text.status(value, prompt), lambda: html.status(value))
    if verb == "status" and isinstance(value, tuple):  # every host
        return Shown(
            value,
            lambda: "\n\n".join(text.host(one, prompt) for one in value),
            lambda: "".join(html.host(one) for one in value),
        )
    if isinstance(value, Plan) and around is not None:
        return Shown(
            value,
            lambda: text.plan(value, around, subject, prompt),
            lambda: html.plan(value, around, subject),
        )
    if isinstance(value, Health):
        return Shown(value, lambda: text.health(value), lambda: html.health(value))
    if isinstance(value, Outcome):
        return Shown(value, lambda: text.outcome(value), lambda: html.outcome(value))
    if isinstance(value, Applied):
        return Shown(value, lambda: text.applied(value), lambda: html.applied(value))
    if verb == "why":
        return Shown(
            value, lambda: text.why(subject, value, prompt), lambda: html.why(subject, value)
        )
    if verb == "config" and isinstance(value, dict):
        return Shown(value, lambda: text.preset(value), lambda: html.preset(value))
    if verb == "config":
        return Shown(value, lambda: text.config(value), lambda: html.config(value))
    if isinstance(value, allocator_map.Mapped):
        return _maps(value, prompt)
    if isinstance(value, Report):
        return Shown(value, lambda: value.text, lambda: html.page(html.pre(value.text)))
    if isinstance(value, str):
        return note(value)
    return value


def with_titles(verb: str, value: Any, rt: Any) -> Any:
    """The answer to `verb`, where allocator maps get titles from the status of `rt`; else `value`."""
    if verb == "fragmentation" and isinstance(value, tuple):
        return allocator_map.mapped(value, rt.status())
    return value


def _maps(value: allocator_map.Mapped, prompt: str) -> Shown:
    if not value.maps:
        return hint(nothing("fragmentation", prompt))
    pairs = list(zip(value.maps, value.titles, strict=True))
    return Shown(
        value,
        lambda: "\n\n".join(allocator_map.as_text(one, title) for one, title in pairs),
        lambda: "".join(allocator_map.as_html(one, title) for one, title in pairs),
    )


def nothing(verb: str, prompt: str = "%gpu") -> str:
    """What to type where a table is empty."""
    return EMPTY.get(verb, "There is nothing to show.").format(prompt=prompt)


def note(words: str) -> Shown:
    """Words as they are, aligned."""
    return Shown(words, lambda: words, lambda: html.page(html.pre(words)))


def hint(sentence: str) -> Shown:
    """A sentence that ends in what to type."""
    return Shown(sentence, lambda: sentence, lambda: html.page(html.line(html.with_code(sentence))))


def is_frame(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "columns")


def frame_text(frame: Any) -> str:
    """A DataFrame as an aligned table for people."""
    return text.frame(frame.to_dict("records"), list(frame.columns))
