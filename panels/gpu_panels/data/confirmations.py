"""The question before an action, and the check whether something has changed since the click.

This module is pure. A click becomes a Proposal at once. A Proposal names one lease of one owner. After the
confirmation, `changed` compares the proposal with a new snapshot. If they differ, the action is not carried out.
"""

from __future__ import annotations

from typing import NamedTuple

from gpu_runtime.facts import (
    DISK,
    HOST,
    Lease,
    LeaseId,
    Phase,
    ProcessState,
    Snapshot,
    Ticket,
    is_engine,
    lease_title,
    place_label,
    where,
)
from gpu_runtime.rendering.views import device_name
from gpu_runtime.safe_text import clean
from gpu_runtime.units import counted, show_bytes, show_seconds

from .cells import process_in_words, why_no_answer

VERBS = {
    "preload": "Preload",
    "evict": "Evict",
    "drop": "Drop",
    "unpin_evict": "Unpin and evict",
    "move": "Move",
    "restore": "Restore",
    "pin": "Pin",
    "unpin": "Unpin",
    "defrag": "Compact",
    "resume": "Continue",  # a stopped process
    "interrupt": "Interrupt",  # the running cell of a process
    "park": "Park",
    "unpark": "Unpark",
    "cancel": "End wait",  # the target is the key of a waiting request
    # The target of the verbs below is a card; see ON_CARDS.
    "drain": "Drain",
    "undrain": "End the drain",
    "compact": "Compact",
    "evict_idle": "Evict all idle",
}
# What a button's tooltip says. A verb without a line has its label there.
MEANS = {
    "evict": "It leaves its card, for RAM if there is room, and returns at its next use",
    "park": "What the notebook's own code holds moves to RAM, and returns before its next cell",
    "pin": "A pinned model stays on its card, whoever needs the room, until it is unpinned",
    "unpin": "It is pinned: it stays on its card, whoever needs the room. Unpinned, it may leave",
    "drain": "Nothing new is put on the card, and idle models leave it",
    "compact": "All processes return cached memory that they do not use to the card",
    "defrag": "The process returns cached memory that it does not use to the card",
    "ack": "Everybody sees that you know of it",
    "silence": "Nobody is told of it for an hour",
}
ON_CARDS = ("drain", "undrain", "compact", "evict_idle")
LEAVES = ("evict", "drop", "unpin_evict")  # the model leaves its card
NOTHING_DONE = "Nothing was done."


class Proposal(NamedTuple):
    """One action on one lease. Defrag, resume and interrupt act on a process, and a verb in ON_CARDS acts on a card."""

    verb: str
    # Owner id / model name, as in the book; `owner id/` for a process, `/CARD` for a card
    target: str
    where: str = ""  # where the model was at the click
    bytes: int = 0
    pid: int = 0  # pid of the process; 0 if no process had published the model
    title: str = ""  # the name for people: a notebook's own code has the notebook's name
    device: str = ""  # the card to move to
    waiting: str = ""  # the key of the waiting request

    @property
    def owner(self) -> str:
        """The id of the process to which the request is sent."""
        return self.target.partition("/")[0]

    @property
    def name(self) -> str:
        """The name of the model, or of the card for a verb in ON_CARDS."""
        return self.target.partition("/")[2]

    @property
    def subject(self) -> LeaseId | str:
        """What the runtime's method takes: the id of the lease, or the name of a model that no process has."""
        return LeaseId(self.owner, self.name) if self.owner else self.name


class Question(NamedTuple):
    """The text of the dialog."""

    title: str
    lines: tuple[str, ...]
    confirm: str  # the label of the button
    grave: bool = False  # whether the action takes memory from a process


def propose(verb: str, target: str, snapshot: Snapshot) -> Proposal:
    """The proposal that a click on `verb` in the row `target` makes.

    `target` is `OWNER_ID/MODEL`, or `/CARD` for an action on a card. For the verb `cancel`, `target` is the key of a
    waiting request. The verb `move` has the card as a second word, such as `move cuda:1`. `snapshot` gives the place
    and size that the visitor saw.
    """
    verb, _, device = verb.partition(" ")
    if verb == "cancel":
        return _propose_cancel(target, snapshot)
    proposal = Proposal(verb, target, where="disk", device=device)
    proposal = proposal._replace(title=proposal.name)
    section = snapshot.sections.get(proposal.owner)
    if section is None:
        return proposal
    proposal = proposal._replace(pid=section.owner.pid)
    if verb in ("resume", "interrupt"):
        return proposal._replace(title=section.owner.label)
    lease = section.lease(proposal.name)
    if lease is None:
        declared = snapshot.declared.get(proposal.owner, {}).get(proposal.name)
        return proposal._replace(bytes=declared.bytes) if declared else proposal
    title = lease_title(lease, section.owner)
    return proposal._replace(where=lease.where, bytes=lease.bytes, title=title)


def _propose_cancel(key: str, snapshot: Snapshot) -> Proposal:
    ticket = _ticket(key, snapshot)
    if ticket is None:
        return Proposal("cancel", "/", title="a request", waiting=key)
    pid = snapshot.sections[ticket.owner].owner.pid if ticket.owner in snapshot.sections else 0
    title = ticket_title(ticket, snapshot)
    return Proposal("cancel", f"{ticket.owner}/{ticket.name}", pid=pid, title=title, waiting=key)


def ticket_title(ticket: Ticket, snapshot: Snapshot) -> str:
    """The name of the model that waits with `ticket`. If a notebook's own code waits, the name of the notebook."""
    return clean(snapshot.title(ticket.owner, ticket.name))


def question(proposal: Proposal, snapshot: Snapshot) -> Question:
    """The text to confirm `proposal`: the model, its bytes, its process, and the effects of the action."""
    process = _process(proposal, snapshot)
    if proposal.verb in ON_CARDS:
        return _question_card(proposal, snapshot)
    if proposal.verb == "cancel":
        return _question_cancel(proposal, process, snapshot)
    if proposal.verb in ("park", "unpark"):
        return _question_park(proposal, process, snapshot)
    if proposal.verb in LEAVES:
        return _question_evict(proposal, process, snapshot)
    if proposal.verb in ("restore", "preload"):
        lease = snapshot.lease(proposal.owner, proposal.name)
        return _question_load(proposal, process, lease)
    name, size = clean(proposal.name), show_bytes(proposal.bytes)
    label = VERBS[proposal.verb]
    held_by = f"Held by {process}."
    is_away = proposal.where in (HOST, DISK)
    away = f"It is {at(proposal.where)} now. " if is_away else ""
    there = "once it is on a card" if is_away else at(proposal.where)
    effects = {
        "move": f"Its {size} move from {device_name(proposal.where)} to {proposal.device}. Only free memory is used: "
        "no other model is evicted.",
        "pin": f"{away}It keeps its {size} {there}: no other model can evict it until it is unpinned.",
        "unpin": f"After that its {size} {at(proposal.where)} are available again: it is evicted when other models "
        "need the memory.",
    }
    if proposal.verb in effects:
        to = f" to {proposal.device}" if proposal.verb == "move" else ""
        return Question(f"{label} {name}{to}?", (effects[proposal.verb], held_by), label)
    if proposal.verb == "resume":
        lines = (
            "It gets the signal SIGCONT, and runs on from where it was stopped.",
            "It keeps its memory. What is idle can then be evicted.",
        )
        return Question(f"Continue {process}?", lines, label)
    if proposal.verb == "interrupt":
        busy_since = snapshot.sections[proposal.owner].busy_since
        seconds = show_seconds(max(0.0, snapshot.now - busy_since)) if busy_since else ""
        lines = (
            f"Its cell has run for {seconds}." if seconds else "",
            "The running cell ends with KeyboardInterrupt, as with the stop button.",
            "Its variables and models stay as they are.",
        )
        lines = tuple(filter(None, lines))
        return Question(f"Interrupt {process}?", lines, label, grave=True)
    lines = (
        "Its allocator returns cached blocks that are not in use to the device.",
        "Models stay where they are. Code that runs there can be slower for a moment, until the "
        "cache is filled again.",
    )
    return Question(f"Compact {process}?", lines, label)


def _question_card(proposal: Proposal, snapshot: Snapshot) -> Question:
    card, label = proposal.name, VERBS[proposal.verb]
    idle = idle_leases(snapshot, card)
    size = show_bytes(sum(lease.bytes_on(card) for lease in idle))
    if proposal.verb == "compact":
        lines: tuple[str, ...] = (
            "The allocators of all processes that take your requests return cached blocks.",
            "Models stay where they are. Code that runs can be slower for a moment.",
        )
        return Question("Compact all processes?", lines, label)
    if proposal.verb == "undrain":
        return Question(f"End the drain of {card}?", (f"{card} can be used again.",), label)
    count = counted(len(idle), "idle model")
    if proposal.verb == "evict_idle":
        lines = (f"This frees {size} on {card}: {count}.", "Each returns at its next use.")
        return Question(f"Evict all idle models on {card}?", lines, f"Evict, freeing {size}", True)
    leave = f"{count} with {size} {'leaves' if len(idle) == 1 else 'leave'} now. " if idle else ""
    lines = (
        f"{card} takes nothing new until the drain is ended or the machine restarts.",
        f"{leave}Models in use leave when they are idle.",
    )
    return Question(f"Drain {card}?", lines, label, grave=True)


def idle_leases(snapshot: Snapshot, card: str) -> list[Lease]:
    """The models on `card` that could be evicted now."""
    return [
        lease
        for lease in snapshot.leases()
        if is_idle(lease) and lease.bytes_on(card) and not why_no_answer(snapshot, lease.owner)
    ]


def is_idle(lease: Lease) -> bool:
    """Whether the `lease` is of a model that could be evicted now."""
    is_settled_model = lease.kind == "model" and lease.phase is Phase.SETTLED
    return is_settled_model and lease.on_device and not lease.pins and not lease.keep


def is_idle_notebook(lease: Lease) -> bool:
    """Whether the `lease` is of a notebook's own code that could be parked now."""
    is_settled = lease.kind == "kernel" and lease.phase is Phase.SETTLED
    return is_settled and lease.on_device and lease.movable and not lease.pins


def _question_evict(proposal: Proposal, process: str, snapshot: Snapshot) -> Question:
    lease = snapshot.lease(proposal.owner, proposal.name)
    size, place = show_bytes(proposal.bytes), proposal.where
    if lease is not None and lease.in_parts:  # its other bytes are in host memory already
        size = show_bytes(lease.card_bytes)
        place = where(tuple(share for share in lease.shares if share.device != HOST))
    verb, name = VERBS[proposal.verb], clean(proposal.name)
    after = _after_eviction(lease)
    if proposal.verb == "drop":
        leaves = "its file on the disk" if lease is not None and lease.on_disk else "RAM"
        after = f"It leaves {leaves} too. Its next use loads it again from its source."
    pinned = "It is pinned. It is unpinned first." if proposal.verb == "unpin_evict" else ""
    lines = (f"This frees {size} {at(place)}.", pinned, _use(lease, process, snapshot), after)
    confirm = f"{verb}, freeing {size}"
    return Question(f"{verb} {name}?", tuple(filter(None, lines)), confirm, grave=True)


def _question_park(proposal: Proposal, process: str, snapshot: Snapshot) -> Question:
    """The question before the memory of a notebook's own code moves to host memory, or returns."""
    lease = snapshot.lease(proposal.owner, proposal.name)
    size, title = show_bytes(proposal.bytes), clean(proposal.title)
    if proposal.verb == "unpark":
        lines: tuple[str, ...] = (
            f"Its {size} in RAM return to the card in {process}.",
            "Idle models and notebooks leave the card if it needs their room.",
            "It also returns by itself before its next cell.",
        )
        return Question(f"Unpark {title}?", lines, "Unpark")
    seconds = lease.restore_seconds if lease else 0.0
    duration = f", in about {show_seconds(seconds)}" if seconds >= 0.1 else ""
    in_use = lease is not None and lease.pins
    lines = (
        f"This frees {size} {at(proposal.where)}.",
        f"{process} runs a cell and is not parked." if in_use else _use(lease, process, snapshot),
        f"All its tensors move to RAM. They return before its next cell{duration}.",
    )
    return Question(f"Park {title}?", lines, f"Park, freeing {size}")


def _question_cancel(proposal: Proposal, process: str, snapshot: Snapshot) -> Question:
    ticket = _ticket(proposal.waiting, snapshot)
    need = show_bytes(ticket.need_bytes) if ticket else ""
    waited = show_seconds(snapshot.now - ticket.arrived) if ticket else ""
    lines = (
        f"{process} has waited {waited} for {need or 'memory'}.",
        "Its cell stops with an error that names you. What is loaded stays where it is.",
        "The cell can be run again, and then waits again.",
    )
    return Question(f"End the wait for {proposal.title}?", lines, VERBS["cancel"], grave=True)


def _question_load(proposal: Proposal, process: str, lease: Lease | None) -> Question:
    label = VERBS[proposal.verb]
    loader = process if proposal.pid else "a process that can load it"
    done = "loaded" if proposal.where == "disk" and lease is None else "moved"
    place = _whereabouts(proposal)
    if lease is not None and lease.on_disk:
        seconds = show_seconds(lease.restore_seconds or lease.seconds_from_disk)
        place = (
            f"Its {show_bytes(lease.bytes)} are in a file on a disk, read back in about {seconds}."
        )
    if lease is not None and lease.in_parts:
        place = f"It has {place_label(lease)}."
    lines = (
        place,
        f"It is {done} to a device by {loader}.",
        "Idle models are evicted if it needs their memory. It waits for models that are in use.",
    )
    return Question(f"{label} {clean(proposal.name)}?", lines, label)


def _whereabouts(proposal: Proposal) -> str:
    size = show_bytes(proposal.bytes)
    if proposal.where == "disk" and not proposal.bytes:
        return "It is not loaded, and its size is not known here."
    if proposal.where == "disk":
        return f"It is not loaded ({size})."
    return f"It is {at(proposal.where)} ({size})."


def at(place: str) -> str:
    """The `place` of a lease as the end of a sentence: `on sim:0`, `on disk` or `in RAM`."""
    return "in RAM" if place == HOST else f"on {place}"


def _use(lease: Lease | None, process: str, snapshot: Snapshot) -> str:
    """The process that holds the model, and whether the model is in use."""
    if lease is not None and lease.pins:
        seconds = snapshot.now - lease.pinned_since
        since = f" for {show_seconds(seconds)}" if lease.pinned_since else ""
        return f"In use by {process}{since}: the eviction is refused until that use ends."
    idle = ""
    if lease is not None and lease.last_used:
        idle = f", idle for {show_seconds(lease.idle_seconds(snapshot.now))}"
    return f"Held by {process}{idle}. It is not in use."


def _after_eviction(lease: Lease | None) -> str:
    """The place of the model after its eviction, and how it returns; empty if the lease is gone."""
    if lease is None:
        return ""
    seconds = lease.restore_seconds or lease.reload_seconds
    duration = f", in about {show_seconds(seconds)}" if seconds >= 0.1 else ""
    if lease.movable and is_engine(lease):
        return f"It sleeps if RAM has space for it. Its next use wakes it automatically{duration}."
    if lease.movable:
        return (
            f"It moves to RAM if there is space. Its next use restores it automatically{duration}."
        )
    return f"It is unloaded. Its next use loads it again from its source automatically{duration}."


def changed(proposal: Proposal, snapshot: Snapshot) -> str:
    """What has changed in `snapshot` since the click that made `proposal`; empty if it may be carried out."""
    difference = _difference(proposal, snapshot)
    return f"{difference} {NOTHING_DONE}" if difference else ""


def _difference(proposal: Proposal, snapshot: Snapshot) -> str:
    name = clean(proposal.title)
    if proposal.verb in ON_CARDS:
        return _card_difference(proposal, snapshot)
    if proposal.waiting:
        if _ticket(proposal.waiting, snapshot) is not None:
            return ""
        gone = f"Nothing waits for {name} any more."
        return gone if proposal.name else "This request no longer waits."
    section = snapshot.sections.get(proposal.owner)
    if section is None:
        had_process = bool(proposal.pid)
        return f"The process that held {name or 'it'} has ended." if had_process else ""
    asleep = why_no_answer(snapshot, proposal.owner)
    if asleep and proposal.verb != "resume":
        return f"{asleep}."
    if proposal.verb == "defrag":
        return ""
    if proposal.verb == "interrupt":
        is_silent = snapshot.state_of(proposal.owner) is ProcessState.SILENT
        does_something = section.busy_since or is_silent
        return "" if does_something else f"{section.owner.label} runs no cell any more."
    if proposal.verb == "resume":
        is_stopped = snapshot.state_of(proposal.owner) is ProcessState.STOPPED
        return "" if is_stopped else f"{section.owner.label} is not stopped any more."
    lease = section.lease(proposal.name)
    if lease is None:
        is_still_loadable = (
            proposal.name in snapshot.names.get(proposal.owner, ())
            and proposal.where == "disk"
            and proposal.verb in ("preload", "pin", "unpin")
        )
        holds = f"{process_in_words(section)} no longer holds it"
        return "" if is_still_loadable else f"{name} is gone: {holds}."
    return _lease_difference(proposal, lease, process_in_words(section))


def _card_difference(proposal: Proposal, snapshot: Snapshot) -> str:
    view = next((view for view in snapshot.devices if view.device.id == proposal.name), None)
    if view is None:
        return f"{clean(proposal.name)} is no longer a device of this host."
    if proposal.verb in ("drain", "undrain") and (proposal.verb == "drain") == bool(view.drained):
        return f"{view.device.id} is {'already' if view.drained else 'not'} drained."
    if proposal.verb == "evict_idle" and not idle_leases(snapshot, view.device.id):
        return f"No idle model is on {view.device.id}."
    return ""


def _lease_difference(proposal: Proposal, lease: Lease, process: str) -> str:
    """What has changed in the `lease` since the click, or "" if nothing has."""
    name, verb = clean(proposal.title), proposal.verb
    if verb == "park" and lease.pins:
        return f"{process} runs a cell now."
    if verb in (*LEAVES, "move") and lease.pins:
        return f"{name} is in use now, by {process}."
    moves = (*LEAVES, "move", "restore", "preload", "park", "unpark")
    if verb in moves and lease.where != proposal.where:
        return f"{name} is {at(lease.where)} now, not {at(proposal.where)}."
    if verb in moves and verb != "preload" and lease.phase is not Phase.SETTLED:
        return f"{name} is already {lease.phase}."
    if verb in ("pin", "unpin") and lease.keep == (verb == "pin"):
        return f"{name} is already {'pinned' if lease.keep else 'not pinned'}."
    return ""


def _ticket(key: str, snapshot: Snapshot) -> Ticket | None:
    return next((ticket for ticket in snapshot.waiting if ticket.key == key), None)


def _process(proposal: Proposal, snapshot: Snapshot) -> str:
    """The process that holds the lease of `proposal`; never `this process`, in which the visitor is not."""
    section = snapshot.sections.get(proposal.owner)
    return process_in_words(section) if section else "no process yet"
