"""The status bar above the tabs: problems, host, ledger, visitor, and the age of the figures.

`status_html` is pure. The browser computes the age by its own clock.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import param
from panel.custom import JSComponent

from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.views import clean, device_title

from ..data.problem_rows import NO_PROBLEMS, summary


class StatusBar(JSComponent):
    """The line at the top of the page."""

    words = param.String("", doc="HTML; the code that made it has escaped all names.")
    as_of = param.String("", doc="Time of the figures, as a person reads it.")
    beat = param.Integer(0, doc="A new number with each update from the server.")
    silence = param.String("no update from the server", doc="Shown when updates stop.")
    announces = param.Boolean(
        False, doc="Whether the browser reports that its page is ready, which calls `ready`."
    )
    chooses = param.Boolean(
        False, doc="Whether the browser reports the theme it wants, which calls `wanted`."
    )
    address = param.String("", doc="The query of the URL that leads to what the page shows.")
    dark = param.Boolean(False, doc="Whether the page is dark, for the browser to remember.")

    _esm = "header.js"
    _stylesheets = ["header.css"]

    ready: Callable[[], None] | None = None
    wanted: Callable[[bool], None] | None = None  # is called with True for a dark theme

    def _handle_msg(self, data: Any) -> None:
        if data == "ready" and self.ready:
            self.ready()
        elif data in ("dark", "light") and self.wanted:
            self.wanted(data == "dark")


def status_html(snapshot: Snapshot, visitor: Any) -> str:
    """HTML with the number of problems, the devices, the host and the ledger of `snapshot`, and the `visitor`."""
    problems = summary(snapshot)
    host = snapshot.host or snapshot.owner.host or "this host"
    simulated = snapshot.simulated
    return "".join(
        (
            '<h1 class="title">GPU console</h1>',
            f'<span class="problems{"" if problems == NO_PROBLEMS else " some"}">{_esc(problems)}</span>',
            _span(
                device_title(snapshot),
                "badge" if simulated else "",
                "These devices are simulated: no GPU is used" if simulated else "",
            ),
            _span(
                f"{host} · {_short(snapshot.ledger)}",
                hint=f"Host {host}, ledger {_without_password(snapshot.ledger)}",
            ),
            _span(_visitor_words(visitor), "who"),
        )
    )


def _visitor_words(visitor: Any) -> str:
    role = "operator" if visitor.may_act else "viewer, read only"
    is_named_like_role = visitor.name == role.partition(",")[0]
    return role if is_named_like_role else f"{visitor.name} · {role}"


def _without_password(url: str) -> str:
    """The `url` without the user and the password that it may contain."""
    kind, slashes, rest = url.partition("://")
    return f"{kind}{slashes}{rest.rpartition('@')[2]}"


def _short(url: str) -> str:
    """A short name of a ledger: its kind and the end of its path.

    >>> _short("keeper:////var/lib/gpu-console/ledger"), _short("redis://user:secret@box:6379/0")
    ('keeper …/gpu-console/ledger', 'redis box:6379/0')
    """
    kind, _, rest = _without_password(url).partition("://")
    parts = rest.rstrip("/").split("/")
    if kind == "keeper" and len(parts) > 3:
        rest = f"…/{'/'.join(parts[-2:])}"
    return f"{kind.rstrip(':')} {rest}".strip()


def _span(text: str, kind: str = "", hint: str = "") -> str:
    return f'<span class="{kind}" title="{_esc(hint or text)}">{_esc(text)}</span>'


def _esc(text: object) -> str:
    return html.escape(clean(text), quote=True)
