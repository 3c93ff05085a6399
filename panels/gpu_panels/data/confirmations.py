"""What a person is asked before anything is done, and whether it is still what they saw. Pure.

A click becomes a Proposal at once: it names one lease of one owner, for good. When it is confirmed the world is looked
at anew, and `changed` says what is not as it was; then nothing is done.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_runtime.facts import HOST, Lease, Phase, Snapshot, holder_label
from gpu_runtime.rendering.views import clean, holder
from gpu_runtime.units import show_bytes, show_seconds

VERBS = {
    "preload": "Preload",
    "evict": "Evict",
    "restore": "Restore",
    "pin": "Pin",
    "unpin": "Unpin",
    "defrag": "Defragment",
}


class Proposal(NamedTuple):
    """One thing to do to one lease, or, for `defrag`, to one owner."""

    verb: str
    target: str  # owner id / model name, as the book has it; the name is empty for defrag
    where: str = ""  # where it lay when it was clicked
    bytes: int = 0
    pid: int = 0

    @property
    def owner(self) -> str:
        return self.target.partition("/")[0]

    @property
    def name(self) -> str:
        return self.target.partition("/")[2]

    @property
    def address(self) -> str:
        """As the runtime's verbs take it: `qwen@4121`; the bare name where no process has it."""
        return f"{self.name}@{self.pid}" if self.pid else self.name


class Question(NamedTuple):
    """What the dialog says."""

    title: str
    lines: tuple[str, ...]
    confirm: str  # the button's words
    grave: bool = False  # it takes something from somebody


def propose(verb: str, target: str, snapshot: Snapshot) -> Proposal:
    """The proposal that a click stands for, as things are now. What is there no more is told by `changed`."""
    owner, _, name = target.partition("/")
    section = snapshot.sections.get(owner)
    lease = section.lease(name) if section else None
    return Proposal(
        verb,
        target,
        lease.where if lease else "disk",
        lease.bytes if lease else 0,
        section.owner.pid if section else 0,
    )


def question(asked: Proposal, snapshot: Snapshot) -> Question:
    """What to ask: the model, the bytes, who uses it, and what will happen to them."""
    who = _held_by(asked, snapshot)
    lease = _lease(asked, snapshot)
    size, name = show_bytes(asked.bytes), clean(asked.name)
    verb = VERBS[asked.verb]
    if asked.verb == "evict":
        lines = (
            f"This frees {size} on {asked.where}.",
            *_users(asked, lease, who, snapshot),
            _fate(lease, snapshot),
        )
        return Question(f"Evict {name}?", lines, f"Evict, freeing {size}", grave=True)
    if asked.verb in ("restore", "preload"):
        at = {
            "disk": "is not loaded, and its size not known here"
            if not asked.bytes
            else f"is not loaded ({size})",
            HOST: f"lies in host memory ({size})",
        }.get(asked.where, f"is on {asked.where} ({size})")
        lines = (
            f"It {at}.",
            f"It is brought to a device by {who if asked.pid else 'a process that can load it'}.",
            "Idle models step aside where that needs room; what is in use is waited for.",
        )
        return Question(f"{verb} {name}?", lines, verb)
    if asked.verb == "pin":
        return Question(
            f"Pin {name}?",
            (
                f"Its {size} on {asked.where} stay taken: no other model can make it step aside until it is unpinned.",
                f"Held by {who}.",
            ),
            verb,
        )
    if asked.verb == "unpin":
        return Question(
            f"Unpin {name}?",
            (
                f"From then on its {size} on {asked.where} may be taken: it steps aside when others need its room.",
                f"Held by {who}.",
            ),
            verb,
        )
    return Question(
        f"Defragment {who}?",
        (
            "Its allocator gives the blocks that it caches and does not use back to the device.",
            "Models stay where they are. What runs there may be slower for a moment, until it has its cache again.",
        ),
        verb,
    )


def _users(asked: Proposal, lease: Lease | None, who: str, snapshot: Snapshot) -> tuple[str, ...]:
    if lease is not None and lease.pins:
        since = (
            f" for {show_seconds(snapshot.now - lease.pinned_since)}" if lease.pinned_since else ""
        )
        return (f"In use by {who}{since}: it will be refused as long as that lasts.",)
    idle = (
        f", idle for {show_seconds(lease.idle_seconds(snapshot.now))}"
        if lease and lease.last_used
        else ""
    )
    return (f"Held by {who}{idle}. Nobody uses it now.",)


def _fate(lease: Lease | None, snapshot: Snapshot) -> str:
    back = "it comes back by itself when it is used next"
    if lease is None:
        return ""
    seconds = lease.restore_seconds or lease.reload_seconds
    slow = f", in about {show_seconds(seconds)}" if seconds >= 0.1 else ""
    if lease.movable:
        return f"It steps aside to host memory where there is room, and {back}{slow}."
    return f"It is dropped and {back}, from its source{slow}."


def changed(asked: Proposal, snapshot: Snapshot) -> str:
    """What is not as it was when it was clicked, in a sentence that says that nothing was done; empty: all is."""
    name, nothing = clean(asked.name), "Nothing was done."
    section = snapshot.sections.get(asked.owner)
    if section is None:
        return f"The process that held {name or 'it'} is gone. {nothing}" if asked.pid else ""
    lease = section.lease(asked.name)
    if asked.verb == "defrag":
        return ""
    if lease is None:
        known = (
            asked.name in section.names
            and asked.where == "disk"
            and asked.verb in ("preload", "pin", "unpin")
        )
        return (
            ""
            if known
            else f"{name} is gone: {holder(snapshot, asked.owner)} holds it no more. {nothing}"
        )
    if asked.verb == "evict" and lease.pins:
        return f"{name} is in use by now, by {holder(snapshot, asked.owner)}. {nothing}"
    if asked.verb in ("evict", "restore", "preload") and lease.where != asked.where:
        return f"{name} is on {lease.where} by now, not on {asked.where}. {nothing}"
    if asked.verb in ("evict", "restore") and lease.phase is not Phase.SETTLED:
        return f"{name} is {lease.phase} already. {nothing}"
    if asked.verb in ("pin", "unpin") and lease.keep == (asked.verb == "pin"):
        return f"{name} is {'pinned' if lease.keep else 'not pinned'} already. {nothing}"
    return ""


def _lease(asked: Proposal, snapshot: Snapshot) -> Lease | None:
    section = snapshot.sections.get(asked.owner)
    return section.lease(asked.name) if section else None


def _held_by(asked: Proposal, snapshot: Snapshot) -> str:
    """The holder, the same for every reader: a visitor may be another user than the one who serves the page."""
    section = snapshot.sections.get(asked.owner)
    return clean(holder_label(section.owner)) if section else "no process yet"
