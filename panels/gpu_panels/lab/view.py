"""The content of JupyterLab's status bar and panel, from one snapshot, as plain values for JSON. Pure.

Times are epoch seconds, so that the values stay equal while nothing changes; the browser computes durations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from gpu_runtime.facts import (
    ASLEEP,
    HOST,
    KERNEL,
    DeviceView,
    Lease,
    ProcessState,
    Section,
    Snapshot,
    Ticket,
    lease_state,
)
from gpu_runtime.rendering.views import OWN_CODE, RESIDUE, device_name, fill, strangers_bytes
from gpu_runtime.safe_text import clean
from gpu_runtime.units import GIB, MIB, show_bytes

from ..data.cells import Button, Row, if_awake, notebook_name, place, why_no_answer
from ..data.confirmations import MEANS, ticket_title
from ..data.devices import figures, level
from ..data.rows import (
    FirstSeen,
    buttons,
    end_wait,
    largest_first,
    model_kind,
    pressed,
    problem_rows,
    state_of,
)

MOST_CARDS = 3  # cards that the status bar lists one by one, unless the user wants their sum
ROW_VERBS = ("evict", "restore", "park", "unpark", "unpin")
PANEL_VERBS = (*ROW_VERBS, "pin", "cancel", "resume")  # problems may offer the last three


class LabKernel(NamedTuple):
    """A kernel of this Jupyter server."""

    id: str  # Jupyter's id
    pids: tuple[int, ...]  # of the kernel, and of the processes that it started
    path: str = ""  # its notebook, relative to the server's root; empty: it has none


class LedgerName(NamedTuple):
    """A ledger as the page names it."""

    key: str  # for requests; it contains no URL
    title: str


def shown(
    snapshot: Snapshot,
    kernels: Sequence[LabKernel],
    ledger: LedgerName,
    others: Sequence[LedgerName] = (),
    tile: LedgerName | None = None,
    first_seen: FirstSeen | None = None,
    week: str = "",
) -> dict[str, Any]:
    """The content of the status bar and of the side panel, for the `kernels` of this server.

    `ledger` is the ledger of the snapshot, `others` are the other active ones, and `tile` is the one that the console's
    tile opens. `first_seen` has the times at which problems were first seen; the caller keeps it between calls.
    `week` is the line about the own last seven days.
    """
    by_pid = {pid: kernel for kernel in kernels for pid in kernel.pids}
    found = [_problem(row) for row in problem_rows(snapshot, first_seen or FirstSeen())]
    is_tile_elsewhere = tile is not None and tile.key != ledger.key
    several = f"{len(others) + 1} ledgers are active" if is_tile_elsewhere and others else ""
    notes = ["simulated"] if snapshot.simulated else []
    if waiting := snapshot.waiting:
        notes.append(f"{len(waiting)} waiting")
    if several:
        notes.append(several)
    if found:
        notes.append("1 problem" if len(found) == 1 else f"{len(found)} problems")
    return {
        "ledger": ledger._asdict(),
        "tile": tile.title if tile else ledger.title,
        "several": several,
        "week": week,
        "means": MEANS,
        "simulated": snapshot.simulated,
        # What the user's setting `show` chooses from: each card, their sum, or a notebook's bytes and the notes.
        "status": " · ".join([cards_text(snapshot), *notes]),
        "sum": " · ".join([cards_text(snapshot, most=1), *notes]),
        "notes": notes,
        "problems": found,
        "devices": [_device(view) for view in snapshot.devices],
        "groups": groups(snapshot, by_pid),
        "waiting": [_waiting(ticket, snapshot, by_pid) for ticket in waiting],
    }


# -- the status bar


def cards_text(snapshot: Snapshot, most: int = MOST_CARDS) -> str:
    """A text about the cards of `snapshot`, with used and usable memory, such as `cuda:0 14/22 GiB`.

    More than `most` cards are added up.
    """
    views = snapshot.cards
    if not views:
        return "no GPU"
    if len(views) > most:
        used, limit = sum(map(used_bytes, views)), sum(view.limit_bytes for view in views)
        return f"{len(views)} GPUs {_of(used, limit)}"
    return " · ".join(
        f"{view.device.id} {_of(used_bytes(view), view.limit_bytes)}" for view in views
    )


def used_bytes(view: DeviceView) -> int:
    """The bytes of a device that are held: all claims, and on a card what programs without gpu-console use.

    Most of the RAM is used by programs that never come near a card, and the budget is not for them.
    """
    return view.claimed_bytes + (0 if view.device.is_host else strangers_bytes(view))


def _of(used: int, limit: int) -> str:
    """The sizes `used` and `limit` as one text, in the unit of `limit`: `14/22 GiB`.

    >>> _of(14 * GIB, 21.6 * GIB), _of(8.5 * GIB, 21.6 * GIB), _of(32 * MIB, 172.8 * MIB)
    ('14/22 GiB', '8.5/22 GiB', '32/173 MiB')
    """
    unit, name = (GIB, "GiB") if limit >= GIB else (MIB, "MiB")
    return f"{_rounded(used / unit)}/{_rounded(limit / unit)} {name}"


def _rounded(value: float) -> str:
    text = f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
    return text.removesuffix(".0")


# -- the side panel


def _problem(row: Row) -> dict[str, Any]:
    text, since, _ = row.cells
    actions = []
    for button in row.buttons:
        verb, target = pressed(button.verb)
        actions.append(_action(button) | {"verb": verb, "target": target})
    is_before = bool(since.text)  # it began at an unknown time before
    began = {"since": round(since.value or 0), "before": is_before}
    return {"text": text.text, **began, "actions": actions}


def groups(snapshot: Snapshot, kernels: Mapping[int, LabKernel]) -> list[dict[str, Any]]:
    """The processes that hold memory, each with its rows, the most bytes on cards first. `kernels` are by pid."""
    sections = [
        section
        for section in snapshot.sections.values()
        if section.leases or any(section.residue.values())
    ]
    found = sorted(sections, key=largest_first)
    shown_groups = [_group(section, snapshot, kernels.get(section.owner.pid)) for section in found]
    unleased = sum(strangers_bytes(view) for view in snapshot.cards)
    if unleased:
        shown_groups.append(_strangers(snapshot, unleased))
    return shown_groups


def _group(section: Section, snapshot: Snapshot, kernel: LabKernel | None) -> dict[str, Any]:
    owner = section.owner
    trouble = snapshot.trouble(owner.id)
    is_other_user = owner.user and owner.user != snapshot.owner.user
    leases = sorted(section.leases, key=lambda lease: (lease.on_host, -lease.bytes, lease.name))
    rows = [_row(lease, section, snapshot) for lease in leases]
    waits = [ticket.arrived for ticket in snapshot.waiting if ticket.owner == owner.id]
    residue = sum(section.residue.values())
    for number, staying in enumerate(section.staying):
        found = {"where": staying.device, "state": f"stays: {clean(staying.why)}"}
        rows.append(_plain_row(f"{owner.id}//{number}", OWN_CODE, staying.bytes, **found))
    if cache := sum(section.cache_on(device) for device in section.residue):
        rows.append(_plain_row(f"{owner.id}//", RESIDUE, cache))
    return {
        "id": owner.id,
        "title": notebook_name(section),
        "pid": owner.pid,
        "user": clean(owner.user) if is_other_user else "",
        "trouble": trouble.state.value if trouble else "",
        "waits": _epoch(min(waits, default=0.0), snapshot),
        "busy": _epoch(section.busy_since, snapshot),
        "idle": _epoch(section.idle_since, snapshot),
        "bytes": _sum_words(leases, residue),
        "kernel": kernel.id if kernel else "",
        "why_not": why_no_interrupt(section, snapshot),
        "path": kernel.path if kernel else "",
        "rows": rows,
    }


def why_no_interrupt(section: Section, snapshot: Snapshot) -> str:
    """Why the kernel of `section` cannot be interrupted; empty if it can. Of a script's cell nothing is known."""
    is_silent = snapshot.state_of(section.owner.id) is ProcessState.SILENT
    is_idle = section.idle_since and not section.busy_since and not is_silent
    return why_no_answer(snapshot, section.owner.id) or ("It runs no cell" if is_idle else "")


def _sum_words(leases: Sequence[Lease], residue: int) -> str:
    """The bytes of a process on the cards: `12.0 GiB`. If none is there: `12.0 GiB in RAM`, or on disk."""
    shares = [share for lease in leases for share in (lease.shares or lease.target)]
    on_cards = sum(share.bytes for share in shares if share.device != HOST) + residue
    in_ram = sum(lease.ram_bytes for lease in leases)
    on_disk = sum(lease.disk_bytes for lease in leases)
    if on_cards or not (in_ram or on_disk):
        return show_bytes(on_cards)
    return f"{show_bytes(in_ram)} in RAM" if in_ram else f"{show_bytes(on_disk)} on disk"


def _row(lease: Lease, section: Section, snapshot: Snapshot) -> dict[str, Any]:
    is_kernel, owner = lease.kind == KERNEL, section.owner
    state = lease_state(lease, snapshot.now)
    says_where = state.away == ASLEEP or lease.on_disk
    is_idle = state.activity == "idle" and not (is_kernel and lease.on_host)
    shown_state = state_of(lease, snapshot)
    words = shown_state.text if is_kernel else state.word
    return {
        "id": lease.id,
        "name": "its own code" if is_kernel else clean(lease.name),
        "hint": shown_state.hint or ("" if is_kernel else model_kind(lease)),
        "where": "" if lease.on_disk else place(lease),  # its state says that
        "bytes": show_bytes(lease.bytes),
        "state": ", ".join(
            filter(
                None, ("pinned" if lease.keep else "", words if not is_idle or says_where else "")
            )
        ),
        "idle": _epoch(lease.last_used, snapshot) if is_idle else None,
        "variables": is_kernel,
        "actions": [
            _action(button)
            for button in if_awake(buttons(lease, owner), lease.owner, snapshot, lease.id)
            if button.verb in ROW_VERBS
        ],
    }


def _action(button: Button) -> dict[str, str]:
    return {"verb": button.verb, "label": button.label, "why_not": button.why_not}


def _plain_row(id: str, name: str, size: int, **more: str) -> dict[str, Any]:
    """A row of memory that no action can free."""
    row: dict[str, Any] = {"id": id, "name": name, "bytes": show_bytes(size), "idle": None}
    return row | {"hint": "", "where": "", "state": "", "variables": False, "actions": []} | more


def _strangers(snapshot: Snapshot, unleased: int) -> dict[str, Any]:
    """The group of programs that do not use gpu-console. `unleased` is the sum of their bytes on the cards."""
    rows = [
        _plain_row(
            f"stranger/{stranger.device}/{stranger.pid}",
            f"{clean(stranger.command) or 'unknown program'} (pid {stranger.pid})",
            stranger.bytes or 0,
        )
        for stranger in snapshot.strangers
    ]
    group: dict[str, Any] = {"id": "strangers", "title": "programs without gpu-console"}
    group |= {"bytes": show_bytes(unleased), "rows": rows, "pid": 0}
    group |= dict.fromkeys(("waits", "busy", "idle"))
    return group | dict.fromkeys(("user", "trouble", "kernel", "why_not", "path"), "")


def _device(view: DeviceView) -> dict[str, Any]:
    """The bar of one device. Its figure is that of the status bar, so on a card it includes all programs."""
    used, words = used_bytes(view), fill(view)
    if unleased := used - view.claimed_bytes:
        others = f"{show_bytes(unleased)} of programs without gpu-console"
        words = f"{fill(replace(view, claimed_bytes=used))}, {others}"
    return {
        "id": view.device.id,
        "title": device_name(view.device.id),
        "name": "" if view.device.simulated else clean(view.device.name),
        "level": level(view)[0],
        "busy": " · ".join(filter(None, figures(view)[:2])),
        "pcie": pcie(view),
        "fill": words,
        "part": round(min(1.0, used / max(1, view.limit_bytes)), 3),
        "drained": clean(view.drained.by) if view.drained else "",
    }


def pcie(view: DeviceView) -> str:
    """The traffic over PCIe to the card and from it, as `PCIe 1.5 GiB/s in, 20.0 MiB/s out`; empty if it is unknown."""
    traffic = view.sample.pcie if view.sample else None
    if traffic is None:
        return ""
    received, sent = (f"{show_bytes(size)}/s" for size in traffic)
    return f"PCIe {received} in, {sent} out"


def _waiting(
    ticket: Ticket, snapshot: Snapshot, kernels: Mapping[int, LabKernel]
) -> dict[str, Any]:
    """A waiting request. If its notebook has a kernel of this server, the path of the notebook is included."""
    section = snapshot.sections.get(ticket.owner)
    kernel = kernels.get(section.owner.pid) if section else None
    return {
        "id": ticket.key,
        "name": ticket_title(ticket, snapshot),
        "path": kernel.path if kernel else "",
        "actions": [_action(end_wait(ticket, snapshot))],
        "holder": notebook_name(section) if section else "",
        "need": show_bytes(ticket.need_bytes),
        "since": _epoch(ticket.arrived, snapshot),
        "because": clean(ticket.because),
    }


def _epoch(stamp: float, snapshot: Snapshot) -> int | None:
    """Converts `stamp`, a time of the snapshot's clock, to epoch seconds; None for 0, which means unknown."""
    return round(snapshot.wall - (snapshot.now - stamp)) if stamp else None


def variables(frame: Any) -> dict[str, Any]:
    """The names that hold a notebook's memory, the largest first, without models, which have rows of their own."""
    rows = [
        {
            "name": clean(record["name"]),
            "kind": record["kind"],
            "bytes": show_bytes(int(record["bytes"])),
            "frees": show_bytes(int(record["alone_bytes"])),
            "cell": clean(record["cell"]),
        }
        for record in frame.to_dict("records")
        if record["kind"] != "model"
    ]
    return {"rows": rows, "note": clean(frame.attrs.get("note") or "")}
