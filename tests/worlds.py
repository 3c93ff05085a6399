"""Builders of books, worlds and requests, so that a test writes each in one line.

Devices are keywords: `sim0=8` is 8 GiB on `sim:0`, `cuda1="500 MiB"` is 500 MiB on `cuda:1`, and
`host=64` is 64 GiB of host memory. Owners are given by their pids. The requester is pid 1, unless a
test sets another. The time is always 1000.0 s after boot.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from gpu_runtime import estimation as estimate
from gpu_runtime.facts import (
    HOST,
    IMPORTANCE,
    Book,
    Device,
    Footprint,
    Grant,
    Lease,
    Owner,
    Phase,
    PlacementRules,
    Refuse,
    Request,
    Rules,
    Sample,
    Section,
    Share,
    Ticket,
    Wait,
    World,
    decode_book,
    encode,
)
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import lru
from gpu_runtime.scheduler.recall import obey
from gpu_runtime.scheduler.transitions import left
from gpu_runtime.units import GIB, parse_bytes

NOW = 1000.0
WALL = 1_700_000_000.0
_DEVICE = re.compile(r"(sim|cuda)(\d+)|host")
_FIELDS = set(Lease.__struct_fields__)


def size(amount: str | float) -> int:
    """The bytes of `amount`. A number without a unit is in GiB."""
    return parse_bytes(amount) if isinstance(amount, str) else int(amount * GIB)


def owner(pid: int = 1, **fields: Any) -> Owner:
    """The owner with this pid."""
    return Owner("box", "boot", pid, 1, **fields)


def at(pid: int, name: str) -> str:
    """The id of the lease `name` of the owner with this pid."""
    return f"{owner(pid).id}/{name}"


def _shares(words: dict[str, Any]) -> tuple[Share, ...]:
    """The shares that the keywords describe. Those keywords are removed from `words`."""
    found = [match for match in map(_DEVICE.fullmatch, words) if match]
    ids = {match[0]: HOST if match[0] == "host" else f"{match[1]}:{match[2]}" for match in found}
    return tuple(Share(id, size(words.pop(word))) for word, id in ids.items())


def _numbered(fields: dict[str, Any]) -> None:
    """Replaces the word of an importance in `fields` by its number."""
    if isinstance(fields.get("importance"), str):
        fields["importance"] = IMPORTANCE[fields["importance"]]


def lease(name: str, *, by: int = 1, **fields: Any) -> Lease:
    """A lease of a model that settled long ago and is idle: `lease("llama", sim0=8, pins=1)`.

    Its weights may be dropped, since the source has them. `by` is the pid of its owner. `fields`
    are devices and fields of Lease.
    """
    shares = _shares(fields)
    _numbered(fields)
    if fields.get("phase") is Phase.ARRIVING and "target" not in fields:
        shares, fields["target"] = (), shares  # no byte is there yet
    return Lease(owner(by).id, name, **{"shares": shares, "droppable": True, **fields})


def block(name: str = "code", *, by: int = 1, **fields: Any) -> Lease:
    """A lease of memory that a running cell has for its own code. The arguments are those of `lease`."""
    return lease(name, by=by, **{"kind": "block", "movable": False, "droppable": False, **fields})


def book(
    *leases: Lease,
    owners: Iterable[int] = (1,),
    tickets: Iterable[Ticket] = (),
    limits: dict[str, int] | None = None,
    residue: dict[int, dict[str, int]] | None = None,
    **fields: Any,
) -> Book:
    """The book with these leases, each in its owner's section.

    `owners` are pids of owners without a lease. `residue` has, by pid, the bytes on each device
    that a process uses beyond its leases.
    """
    pids = {int(lease.owner.split(".")[0]) for lease in leases} | set(owners)
    pids |= {int(ticket.owner.split(".")[0]) for ticket in tickets}
    sections = {}
    for pid in sorted(pids):
        process = owner(pid)
        sections[process.id] = Section(
            process,
            tuple(lease for lease in leases if lease.owner == process.id),
            (residue or {}).get(pid, {}),
        )
    return Book(sections=sections, tickets=tuple(tickets), limits=limits or {}, **fields)


def world(
    *,
    now: float = NOW,
    total: dict[str, str | float] | None = None,
    free: dict[str, str | float | None] | None = None,
    taken_at: float | None = None,
    processes: dict[int, int | None] | None = None,
    **words: Any,
) -> World:
    """A world with the given budget for each device, and rules: `world(sim0=20, host=64, grace_seconds=0)`.

    `total` is the size of a device whose budget is smaller. `free` maps devices to the free memory that the driver
    reported at `taken_at`. A `cuda` device always has such a measurement; the host has one if it is in `free`.
    """
    budgets = _shares(words := words | {"host": words.get("host", 64)})
    devices, samples = [], {}
    for budget in budgets:
        whole = size((total or {}).get(budget.device, budget.bytes / GIB))
        real = budget.device.startswith("cuda") or budget.device in (free or {})
        devices.append(Device(budget.device, whole, simulated=not real))
        if real and free is not None and budget.device in free:
            free_bytes = free[budget.device]
            samples[budget.device] = Sample(
                budget.device,
                now - 0.1 if taken_at is None else taken_at,
                None if free_bytes is None else size(free_bytes),
                processes or {},
            )
    limits = {budget.device: budget.bytes for budget in budgets}
    return World(now, WALL + now, tuple(devices), limits, samples, Rules(**words))


def request(
    name: str,
    gib: str | float = 1,
    *,
    by: int = 1,
    key: str = "",
    arrived: float = NOW,
    devices: tuple[str, ...] = (),
    policy: str = "best-fit",
    layout: str = "single",
    rules: dict[str, Any] | None = None,
    heads: int = 0,
    pieces: tuple[int, ...] = (),
    held: tuple[str, ...] = (),
    wait: bool = True,
    **fields: Any,
) -> Request:
    """A request for a model of `gib` GiB. By default it needs one device; with another `layout` it uses several."""
    _numbered(fields)
    wanted = Lease(owner(by).id, name, **fields)
    footprint = replace(Footprint.of(size(gib)), heads=heads, pieces=pieces)
    return Request(
        key or f"{by}:{name}", wanted, footprint, arrived,
        PlacementRules(devices, layout, policy, **(rules or {})), held, wait,
    )  # fmt: skip


def ticket(
    name: str,
    *,
    by: int = 1,
    key: str = "",
    arrived: float = NOW - 10,
    refreshed: float = NOW,
    **fields: Any,
) -> Ticket:
    """A request that is waiting in the book: `ticket("qwen", by=2, sim0=14)`."""
    need = _shares(fields)
    _numbered(fields)
    return Ticket(
        key or f"{by}:{name}", owner(by).id, fields.pop("verb", "use"), name, arrived, refreshed,
        need=need, **fields,
    )  # fmt: skip


def footprint(backend: Any, spec: Any, origin: Any = None, **known: Any) -> Footprint:
    """The footprint that `gpu_runtime.estimation` computes from the evidence of `backend`."""
    evidence = backend.evidence(spec, origin)
    return estimate.footprint(
        spec.name, evidence, declared=spec.size, options=spec.options, **known
    )


# -- decisions made twice, and followed to their end -----------------------------------------------


def replayed(decision: Callable[[Book], Any], page: Book) -> Any:
    """The result of `decision`, which must be repeatable.

    The second call must return the same, also on the page as another process would read it.
    """
    answer = decision(page)
    assert decision(page) == answer, "a decision is pure"
    assert decision(decode_book(encode(page))) == answer, "a page read back decides the same"
    return answer


def decide(page: Book, wanted: Request, there: World) -> Any:
    """The result of `admit`. `replayed` checks that it is repeatable."""
    return replayed(lambda book: admit(book, wanted, there, lru), page)


def ask_until(
    page: Book, wanted: Request, there: World, *, rounds: int = 20
) -> tuple[Book, list[Any]]:
    """The book and the verdicts after repeating the request for at most `rounds` rounds.

    In each round all owners obey the requests of others, and a tenth of a second passes. A wait for
    a certain time ends at once.
    """
    verdicts: list[Any] = []
    for _ in range(rounds):
        page, verdict = decide(page, wanted, there)
        verdicts.append(verdict)
        if isinstance(verdict, (Grant, Refuse)):
            break
        for step in verdict.steps:
            page = left(page, step, getattr(step, "shares", ()), there)
        there = replace(there, now=there.now + 0.1, wall=there.wall + 0.1)
        for id in list(page.sections):
            page, steps, _ = obey(page, id, there, f"obey {id}")
            for step in steps:
                page = left(page, step, getattr(step, "shares", ()), there)
        if (
            isinstance(verdict, Wait)
            and verdict.retry_at is not None
            and not verdict.steps
            and not verdict.asked
        ):
            later = max(there.now, verdict.retry_at)
            there = replace(there, now=later, wall=there.wall + later - there.now)
    return page, verdicts
