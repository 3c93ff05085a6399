"""`defrag`, as it is typed: this process gives its cache back, others are asked, and each answer is told."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import GpuError
from ..facts import Book, Outcome
from ..units import parse_seconds, show_bytes

if TYPE_CHECKING:
    from ..runtime import Runtime


def defrag(rt: Runtime, process: str, timeout: str | float | None) -> Outcome:
    """Everybody whom this user may ask gives back what nobody uses, or the one process that is named does.

    All together are waited for `timeout` seconds; who is silent by then does it once its kernel runs again. Raises as
    Runtime.defrag.
    """
    keeper = rt._keeper
    book, me = keeper.ledger.read(), keeper.me
    seconds = None if timeout is None else parse_seconds(timeout)
    chosen = (
        _named(rt, process, book)
        if process
        else [id for id, section in book.sections.items() if section.names or section.leases] + [me]
    )
    here = rt._empty_cache() if me in chosen else None
    told = [] if here is None else [f"{show_bytes(here)} came free here"]
    if here is not None:
        keeper.acted("defrag", "", told[0], here)
    freed, done, until = here or 0, True, keeper.clock() + (seconds or 0.0)
    for id in dict.fromkeys(id for id in chosen if id != me):
        owner = book.sections[id].owner
        if not process and rt._foreign("defrag", owner, ""):
            continue
        left = None if seconds is None else max(0.0, until - keeper.clock())
        answer = rt._asked("defrag", id, "", left, wait=left != 0.0, must=bool(process))
        freed, done = freed + answer.bytes, done and (answer.done or not process)
        told.append(
            f"{owner.label}: {answer.because}" + ("" if answer.done else ", and has yet to answer")
        )
    return Outcome("defrag", process, done, "; ".join(told), freed)


def _named(rt: Runtime, process: str, book: Book) -> list[str]:
    """The owners in that process, or the one that has a model of that name.

    Raises GpuError, and as Runtime._resolve.
    """
    if process in book.sections:
        return [process]
    number = process.removeprefix("@")
    if not number.isdigit():
        return [rt._resolve(process, loadable=True)[0]]
    owners = [id for id, section in book.sections.items() if str(section.owner.pid) == number]
    if not owners and number != str(os.getpid()):
        known = (
            ", ".join(sorted(section.owner.label for section in book.sections.values())) or "none"
        )
        raise GpuError(
            f"no process {number} shares this ledger's memory. Those that do: {known}.\n"
            f"  Ask all of them:  %gpu defrag",
            process=number,
        )
    return owners or [rt._keeper.me]
