"""What the page says above its tabs: how full it is, which box and ledger, who looks, and how fresh it all is.

`words` is pure. The strip itself tells the age of the figures by the browser's clock.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import param
from panel.custom import JSComponent

from gpu_runtime.facts import Snapshot
from gpu_runtime.rendering.views import clean, device_title, worst_level

from ..palette import LEVELS, level_word


class Strip(JSComponent):
    """The line at the top."""

    words = param.String("", doc="HTML, escaped by whoever made it.")
    as_of = param.String("", doc="When the figures were true, as a person reads it.")
    beat = param.Integer(0, doc="Another number each time something was heard.")
    silence = param.String(
        "nothing heard from the server", doc="What to say when nothing is heard any more."
    )
    announces = param.Boolean(
        False, doc="Whether it says when its page is there, as `ready` then hears."
    )
    chooses = param.Boolean(
        False, doc="Whether it says which theme the browser wants, as `wanted` then hears."
    )
    dark = param.Boolean(False, doc="The page's theme, for the browser to remember.")

    _esm = "header.js"
    _stylesheets = ["header.css"]

    ready: Callable[[], None] | None = None
    wanted: Callable[[bool], None] | None = None  # dark

    def _handle_msg(self, data: Any) -> None:
        if data == "ready" and self.ready:
            self.ready()
        elif data in ("dark", "light") and self.wanted:
            self.wanted(data == "dark")


def words(snapshot: Snapshot, visitor: Any) -> str:
    """The worst pressure level, what kind of box it is, its ledger, and who looks."""
    level = worst_level(snapshot)
    look = LEVELS[level]
    place = f"{snapshot.host or snapshot.owner.host or 'this host'}"
    role = "operator" if visitor.may_act else "viewer, read only"
    who = role if visitor.name == role.partition(",")[0] else f"{visitor.name} · {role}"
    parts = [
        '<span class="title">GPU console</span>',
        f'<span class="level" style="background:{look.colour};color:{look.ink}" title="The worst pressure of any '
        f'device">{_esc(level_word(level))}</span>',
    ]
    parts.append(
        _span(
            device_title(snapshot),
            "badge" if snapshot.simulated else "",
            "These devices are simulated: no GPU is touched" if snapshot.simulated else "",
        )
    )
    parts.append(
        _span(
            f"{place} · {_short(snapshot.ledger)}",
            "",
            f"Host {place}, ledger {_open(snapshot.ledger)}",
        )
    )
    parts.append(_span(who, "who"))
    return "".join(parts)


def _open(url: str) -> str:
    """The address without the user and password that may stand in it."""
    kind, slashes, rest = url.partition("://")
    return f"{kind}{slashes}{rest.rpartition('@')[2]}"


def _short(url: str) -> str:
    """A ledger by its kind and the end of its path.

    >>> _short("sqlite:////var/lib/gpu-console/ledger"), _short("redis://user:secret@box:6379/0")
    ('sqlite …/gpu-console/ledger', 'redis box:6379/0')
    """
    kind, _, rest = _open(url).partition("://")
    parts = rest.rstrip("/").split("/")
    if kind == "sqlite" and len(parts) > 3:
        rest = f"…/{'/'.join(parts[-2:])}"
    return f"{kind.rstrip(':')} {rest}".strip()


def _span(said: str, kind: str = "", hint: str = "") -> str:
    return f'<span class="{kind}" title="{_esc(hint or said)}">{_esc(said)}</span>'


def _esc(said: object) -> str:
    return html.escape(clean(said), quote=True)
