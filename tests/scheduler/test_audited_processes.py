"""Processes at work, a book, and an auditor with the bytes really held: laws 1 to 6 and 9 after each step."""

import inspect
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import (
    HOST,
    Book,
    Device,
    Drop,
    Footprint,
    Grant,
    Lease,
    Load,
    Move,
    Phase,
    PlacementRules,
    Refuse,
    Request,
    Rules,
    Sample,
    Share,
    Wait,
    World,
)
from gpu_runtime.ledgers.invariants import refuse_unlawful
from gpu_runtime.scheduler import transitions
from gpu_runtime.scheduler import transitions as books
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.policies import cost_aware, lru
from gpu_runtime.scheduler.queue import load_seconds
from gpu_runtime.scheduler.recall import ask, new_order, obey
from gpu_runtime.scheduler.relief import relieve
from gpu_runtime.scheduler.transitions import Truth
from tests.worlds import NOW, WALL, owner, replayed

LIMITS = {"sim:0": 12, "sim:1": 8, "cuda:0": 10, HOST: 14}
CARD_TOTAL = 11
MODELS = ["a", "b", "c", "d"]

COUNTED = dict(offloads="offloaded", unloads="unloaded", restorations="restored", loads="loaded")

MOSTLY = [True, True, True, False]
# The values of each argument of what may happen.
RANGES: dict[str, Any] = {
    "which": range(12),  # selects one of a list; the number is taken modulo its length
    "of": range(12),
    "name": MODELS,
    "size": range(1, 14),
    "importance": [1, 5, 10, 10, 10, 10, 20, 30],
    "cards": [(), (), (), ("sim:0",), ("sim:1", "cuda:0")],
    "layout": ["single", "single", "auto", "balanced", "proportional", "whole"],
    "more": [0, 0, 6],
    "keep_alive": [0.0, 0.0, 60.0],
    "less": range(3),
    "verb": ["evict", "evict", "pin", "unpin", "preload"],
    "seconds": [0.1, 1.0, 2.5, 5.0, 31.0, 130.0],
    "sure": [True, False],
    "one": [True, False],
    **dict.fromkeys(("nested", "received", "droppable", "works", "freed"), MOSTLY),
}


DEVICES = tuple(
    Device(id, limit if id != "cuda:0" else CARD_TOTAL, simulated=id != "cuda:0")
    for id, limit in LIMITS.items()
)


# What a request may wait for, if no lease leaves for it and none is named.
HOPES = (
    "more important",
    "being evicted",
    "its process tries again",
    "is pinned",
    "no room for it now",
)


class Process:
    """The bytes that one process really holds, and its work in progress."""

    def __init__(self, pid: int) -> None:
        self.owner = owner(pid)
        self.id = self.owner.id
        self.models: dict[str, Lease] = {}  # settled, with pins of this moment
        self.asking: dict[str, Request] = {}  # requests that have no answer or no room yet
        self.arriving: dict[str, Grant] = {}  # by key: bytes may arrive at any moment
        self.departing: list[tuple[str, Move | Drop]] = []  # received steps that are not done yet
        self.keys: set[str] = set()

    def truth(self) -> Truth:
        return Truth(self.owner, tuple(self.models.values()), tuple(sorted(self.keys)))

    def holds(self) -> Counter[str]:
        """The bytes on each device that the process may hold at the worst moment of its work in progress."""
        held: Counter[str] = Counter()
        for model in self.models.values():
            held.update({share.device: share.bytes for share in model.shares})
        for grant in self.arriving.values():
            held.update({share.device: share.bytes for share in grant.lease.target})
        for _, step in self.departing:
            if isinstance(step, Move):
                held.update({share.device: share.bytes for share in step.shares})
        return held

    def held_by_waiting_threads(self) -> set[str]:
        return {id.partition("/")[2] for request in self.asking.values() for id in request.held}


def may_exit(process: Process, model: Lease) -> bool:
    return bool(model.pins) and model.name not in process.held_by_waiting_threads()


class Auditor:
    def build(
        self, rank: Any, strangers: int, relief: str, offload: bool, loaded: list[Any]
    ) -> None:
        self.rank, self.strangers = rank, strangers
        self.rules = Rules(relief=relief, offload=offload)
        self.now = NOW
        self.serial = 0
        self.book = Book()
        self.processes = {pid: Process(pid) for pid in (1, 2, 3)}
        self.dead: list[Process] = []
        self.samples: dict[str, Sample] = {}
        self.lingering: dict[int, int] = {}  # pid -> bytes that the driver has not freed yet
        self.done = Counter()
        self.last_pid = 3
        self.take_sample()
        for process in self.processes.values():
            self.change(process, lambda book, world: book)
        for which, name, size, importance, droppable in loaded:
            self.cell(which, name, size, importance, droppable)
            self.now += 1.5
            self.take_sample()

    # -- how a process writes

    def world(self) -> World:
        return World(self.now, WALL + self.now, DEVICES, LIMITS, self.samples, self.rules)

    def write(self, process: Process, decision: Any) -> tuple[Book, Any]:
        """One transaction of `process`, which first publishes its own section: the new page and the answer."""
        world, truth, old = self.world(), process.truth(), self.book

        def deciding(book: Book) -> tuple[Book, Any, Book]:
            base = transitions.measure(books.publish(book, truth, world), world)
            after, *answer = decision(base, world)
            return after, answer[0] if len(answer) == 1 else tuple(answer), base

        new, answer, base = replayed(deciding, old)
        refuse_unlawful(old, new, process.id, lambda book: frozenset(p.id for p in self.dead))
        for event in new.events:
            assert event.because, f"{event.action} of {event.model} without a reason"
        for lease in new.leases():
            before = base.find(lease.id)
            if lease.phase is Phase.LEAVING and before and before.phase is not Phase.LEAVING:
                assert not before.pins and not before.keep and before.kind == "model", (
                    f"law 4: {before}"
                )
        self.book = new
        return base, answer

    def change(self, process: Process, made: Callable[[Book, World], Book]) -> None:
        """Writes a change that is no decision."""
        self.write(process, lambda book, world: (made(book, world), None))

    def key(self, process: Process, what: str) -> str:
        self.serial += 1
        key = f"{process.id}:{self.serial}:{what}"
        process.keys.add(key)
        return key

    def check_steps(
        self, book: Book, steps: tuple[Any, ...], importance: int | None = None
    ) -> None:
        for step in steps:
            lease = book.find(step.lease)
            assert step.because
            assert lease.droppable or not isinstance(step, Drop), f"law 5: {lease}"
            if importance is not None:
                # a request never displaces a more important lease
                assert lease.importance >= importance

    # -- requests

    def pick(self, which: int) -> Process:
        return list(self.processes.values())[which % len(self.processes)]

    def request(
        self,
        which: int,
        name: str,
        size: int,
        importance: int,
        nested: bool,
        received: bool,
        cards: tuple[str, ...],
        layout: str,
        more: int,
        keep_alive: float,
    ) -> None:
        process = self.pick(which)
        if len(process.asking) > 2:
            return
        key = self.key(process, f"use {name}")
        pinned = sorted(model.id for model in process.models.values() if model.pins)
        wanted = Lease(process.id, name, importance=importance, keep_alive=keep_alive)
        rules, held = PlacementRules(cards, layout, margin_bytes=0), tuple(pinned) if nested else ()
        footprint = Footprint.of(size + more)
        process.asking[key] = Request(key, wanted, footprint, self.now, rules, held)
        self.send(process, key, received)

    def cell(self, which: int, name: str, size: int, importance: int, droppable: bool) -> None:
        """A whole cell, if there is room at once: the process requests, loads, uses and releases a model."""
        process = self.pick(which)
        key = self.key(process, f"use {name}")
        wanted = Lease(process.id, name, importance=importance)
        process.asking[key] = Request(key, wanted, Footprint.of(size), self.now)
        self.send(process, key, True)
        if key in process.arriving:
            self.finish(process, key, False, droppable, 0)
            process.models[name] = replace(process.models[name], pins=0)

    def waiting(self) -> list[tuple[Process, str]]:
        """The requests that may be repeated. A process with a step to do first cannot repeat its requests."""
        return [
            (process, key)
            for process in self.processes.values()
            for key in sorted(process.asking)
            if key not in process.arriving and not any(key == k for k, _ in process.departing)
        ]

    def ask_again(self, which: int, received: bool) -> None:
        """Repeats a request, even if the answer of its last decision was not received."""
        waiting = self.waiting()
        self.send(*waiting[which % len(waiting)], received)

    def send(self, process: Process, key: str, received: bool) -> None:
        request = process.asking[key]
        ask = lambda book, world: admit(book, request, world, self.rank)
        base, verdict = self.write(process, ask)
        assert verdict.because
        self.check_verdict(base, request, verdict)
        if not received:
            return  # the page was written, and the answer was lost
        if isinstance(verdict, Grant):
            if verdict.steps:
                process.arriving[key] = verdict
            else:
                model = process.models[request.lease.name]
                process.models[model.name] = replace(model, pins=model.pins + 1, last_used=self.now)
                self.close(process, key)
        elif isinstance(verdict, Refuse):
            self.close(process, key)
        else:
            process.departing += [(key, step) for step in verdict.steps]

    def check_verdict(self, base: Book, request: Request, verdict: Any) -> None:
        if isinstance(verdict, Refuse):
            # law 7: a refusal evicts nothing
            assert list(self.book.leases()) == list(base.leases())
            assert self.book.ticket(request.key) is None
        elif isinstance(verdict, Grant) and verdict.steps:
            lease = self.book.lease(request.lease.owner, request.lease.name)
            assert self.book.ticket(request.key) is None
            assert lease == verdict.lease
            assert lease.pins
            assert lease.phase is Phase.ARRIVING
            assert lease.key == request.key
        elif isinstance(verdict, Wait):
            again = base.lease(request.lease.owner, request.lease.name)
            self.check_steps(base, verdict.steps, request.lease.importance)
            for id in verdict.asked:
                asked = base.find(id)
                assert asked.owner != request.lease.owner and not asked.pins and not asked.keep
                assert asked.importance >= request.lease.importance
                seconds = load_seconds(base, request)
                overdue = self.now >= request.arrived + self.rules.most_wait(seconds)
                assert overdue or self.now >= asked.last_used + self.rules.grace_seconds
            hope = verdict.steps or verdict.asked or verdict.blockers or verdict.ahead
            hope = hope or verdict.retry_at is not None or (again and again.phase != Phase.SETTLED)
            assert hope or any(words in verdict.because for words in HOPES), verdict
            assert verdict.retry_at is None or verdict.retry_at > self.now

    def close(self, process: Process, key: str) -> None:
        process.asking.pop(key, None)
        process.arriving.pop(key, None)
        process.keys.discard(key)
        if self.book.ticket(key):
            self.change(process, lambda book, world: book.without_ticket(key))

    def interrupt(self, which: int) -> None:
        """At any instruction: its thread ends, and the decision's key is released. The monitor cleans up later."""
        asking = [
            (process, key) for process in self.processes.values() for key in sorted(process.asking)
        ]
        process, key = asking[which % len(asking)]
        if not any(k == key for k, _ in process.departing):  # a move that has begun is completed
            process.asking.pop(key)
            process.arriving.pop(key, None)
            process.keys.discard(key)

    def time_out(self, which: int) -> None:
        waiting = self.waiting()
        process, key = waiting[which % len(waiting)]
        before = self.book.claims()
        self.close(process, key)
        assert self.book.ticket(key) is None
        assert all(size <= before[device] for device, size in self.book.claims().items()), "law 9"

    # -- steps

    def arrive(self, which: int, works: bool, droppable: bool, less: int) -> None:
        every = self.processes.values()
        arriving = [(process, key) for process in every for key in sorted(process.arriving)]
        self.finish(*arriving[which % len(arriving)], not works, droppable, less)

    def finish(self, process: Process, key: str, fails: bool, droppable: bool, less: int) -> None:
        grant = process.arriving.pop(key)
        [step] = grant.steps
        name = grant.lease.name
        old = process.models.get(name)
        if fails:
            self.write(
                process,
                lambda book, world: (
                    books.abandon(book, process.id, name, key, world, "it failed"),
                    None,
                ),
            )
            now = self.book.lease(process.id, name)
            # law 9
            assert (now is None) if old is None else (now.shares == old.shares and not now.target)
            return  # the thread repeats the request, or gives up
        assert isinstance(step, Load) == (old is None)
        first, *others = step.shares
        size = first.bytes if isinstance(step, Move) else max(1, first.bytes - less)
        droppable = old.droppable if old else droppable
        settled = grant.lease.holding((Share(first.device, size), *others))
        times = dict(settled_at=self.now, last_used=self.now, away_since=0.0)
        process.models[name] = replace(settled, pins=1, droppable=droppable, **times)
        told = dict(because=step.because, droppable=droppable, filled=settled.filled)
        self.change(
            process,
            lambda book, world: books.arrived(
                book, process.id, name, settled.shares, world, **told
            ),
        )
        self.done["restored" if old else "loaded"] += 1
        self.close(process, key)

    def depart(self, which: int, works: bool) -> None:
        departing = [process for process in self.processes.values() if process.departing]
        process = departing[which % len(departing)]
        key, step = process.departing.pop(0)
        name = step.lease.partition("/")[2]
        model = process.models.get(name)
        # the model stays if it was used meanwhile, or if the step failed
        if model is None or model.pins or not works:
            stay = lambda book, world: books.abandon(book, process.id, name, key, world, "stays")
            self.change(process, stay)
        elif isinstance(step, Drop):
            assert model.droppable, "law 5"
            del process.models[name]
            self.change(process, lambda book, world: books.left(book, step, (), world))
            self.done["unloaded"] += 1
        else:
            process.models[name] = replace(
                model, shares=step.shares, filled=(), settled_at=self.now, away_since=self.now
            )
            self.change(process, lambda book, world: books.left(book, step, step.shares, world))
            self.done["offloaded"] += 1
        if key not in process.asking and not any(k == key for k, _ in process.departing):
            process.keys.discard(key)

    # -- actions of an owner by itself

    def free_to_change(self, process: Process, name: str) -> bool:
        moving = any(step.lease.endswith(f"/{name}") for _, step in process.departing)
        return not moving and not any(g.lease.name == name for g in process.arriving.values())

    def models(self, true: Any) -> list[tuple[Process, Lease]]:
        return [
            (process, model)
            for process in self.processes.values()
            for model in process.models.values()
            if true(process, model)
        ]

    def enter(self, which: int) -> None:
        """Enters a block, without the ledger, even if a decision to evict its model was made just before."""
        models = self.models(lambda process, model: model.on_device)
        process, model = models[which % len(models)]
        process.models[model.name] = replace(
            model, pins=model.pins + 1, last_used=self.now, pinned_since=self.now
        )

    def exit(self, which: int, one: bool) -> None:
        models = self.models(may_exit)
        for process, model in [models[which % len(models)]] if one else models:
            process.models[model.name] = replace(
                model, pins=model.pins - 1 if one else 0, last_used=self.now
            )

    def publish(self, which: int) -> None:
        process = self.pick(which)
        if process:
            self.change(process, lambda book, world: book)
            mine = self.book.sections[process.id]
            if not process.arriving and not process.departing and not process.asking:
                assert {lease.name: lease for lease in mine.leases} == process.models
                theirs = {t.key for t in self.book.tickets if t.key.split(":")[0] == process.id}
                assert theirs <= process.keys, "law 9: what it does not know is withdrawn"

    def give_up(self, which: int, sure: bool) -> None:
        models = self.models(self.may_go)
        process, model = models[which % len(models)]
        if sure:
            del process.models[model.name]
            self.change(process, lambda book, world: book.without_lease(process.id, model.name))
            assert self.book.lease(process.id, model.name) is None

    def may_go(self, process: Process, model: Lease) -> bool:
        return not model.pins and self.free_to_change(process, model.name)

    # -- requests of other owners

    def ask_other(self, which: int, of: int, verb: str) -> None:
        process, leases = self.pick(which), list(self.book.leases())
        lease = leases[of % len(leases)]
        if lease.owner != process.id:
            key = self.key(process, verb)
            asked = new_order(key, process.id, verb, lease.id, self.now)
            _, verdict = self.write(process, lambda book, world: ask(book, asked, world))
            assert verdict.because
            if not isinstance(verdict, Wait):
                assert self.book.ticket(key) is None
                process.keys.discard(key)

    def obey(self, which: int) -> None:
        process = self.pick(which)
        key = self.key(process, "obey")
        base, (steps, orders) = self.write(
            process, lambda book, world: obey(book, process.id, world, key)
        )
        self.check_steps(base, steps)
        process.departing += [(key, step) for step in steps]
        if not steps:
            process.keys.discard(key)
        for order in orders:
            model = process.models.get(order.name)
            if model and order.verb in ("pin", "unpin"):
                process.models[order.name] = replace(model, keep=order.verb == "pin")

    def all_obey(self) -> None:
        for which in range(len(self.processes)):
            self.obey(which)
        while any(process.departing for process in self.processes.values()):
            self.depart(0, True)

    def relieve(self, which: int) -> None:
        process = self.pick(which)
        if process:
            key = self.key(process, "relieve")
            base, steps = self.write(
                process, lambda book, world: relieve(book, process.id, world, self.rank, key)
            )
            self.check_steps(base, steps)
            for step in steps:
                model = base.find(step.lease)
                assert self.now >= model.last_used + max(self.rules.grace_seconds, model.keep_alive)
            process.departing += [(key, step) for step in steps]
            if not steps:
                process.keys.discard(key)

    # -- life, death and time

    def die(self, which: int, sure: bool) -> None:
        if sure:
            slot = list(self.processes)[which % 3]
            process = self.processes.pop(slot)
            self.dead.append(process)
            self.lingering[process.owner.pid] = process.holds()["cuda:0"]

    def reap(self, which: int) -> None:
        by, totals = self.pick(which), books.totals(self.book)
        ids = [process.id for process in self.dead]
        self.change(by, lambda book, world: books.reap(book, ids, world))
        assert not set(ids) & {*self.book.sections, *(one.owner for one in self.book.tickets)}
        assert books.totals(self.book) == totals, "a reaping is no eviction, and undoes none"
        self.dead = []
        self.last_pid += 1
        slot = next(slot for slot in (1, 2, 3) if slot not in self.processes)
        self.processes[slot] = Process(self.last_pid)
        self.change(self.processes[slot], lambda book, world: book)

    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    def take_sample(self, freed: bool = True) -> None:
        """As the driver reports it: the settled bytes, none arriving; a dead process is listed for a while."""
        if freed:
            self.lingering = {}
        models = [m for process in self.processes.values() for m in process.models.values()]
        settled = sum(model.bytes_on("cuda:0") for model in models)
        free = CARD_TOTAL - self.strangers - settled - sum(self.lingering.values())
        self.samples = {"cuda:0": Sample("cuda:0", self.now, free, dict(self.lingering))}

    # -- the auditor

    def no_device_is_over_its_budget(self) -> None:
        held: Counter[str] = Counter()
        for process in self.processes.values():
            held.update(process.holds())
        # law 12: not free before the driver reports it
        held["cuda:0"] += sum(self.lingering.values())
        for device, size in held.items():
            assert size <= LIMITS[device], f"law 1: {size} on {device}"
        # law 11: the card itself is over
        assert held["cuda:0"] + self.strangers <= CARD_TOTAL

    def what_is_held_is_in_the_book(self) -> None:
        """The book has all bytes that the processes hold (laws 3 and 6)."""
        for process in self.processes.values():
            section = self.book.sections[process.id]
            claimed: Counter[str] = Counter()
            for lease in section.leases:
                for share in lease.claims():
                    claimed[share.device] += share.bytes
            for device, size in process.holds().items():
                assert size <= claimed[device], f"{process.id} on {device}, the book: {claimed}"

    def evictions_are_offloads_and_unloads(self) -> None:
        totals = books.totals(self.book)
        assert totals["evictions"] == totals["offloads"] + totals["unloads"]
        for total, action in COUNTED.items():
            assert totals[total] == self.done[action]

    def teardown(self) -> None:
        """Ends all processes. The book must then claim no byte (law 3)."""
        for process in self.processes.values():
            self.book = books.resign(self.book, process.id)
        self.book = books.reap(self.book, [process.id for process in self.dead], self.world())
        self.now += 0.1
        self.take_sample()
        assert transitions.measure(self.book, self.world()).claims() == {}


# How often each of these happens, among those that can happen.
WEIGHTS = dict(
    request=6, cell=2, ask_again=8, interrupt=1, time_out=1, arrive=8, depart=8, enter=3, exit=4, publish=2, give_up=1,
    ask_other=1, obey=3, all_obey=2, relieve=1, die=1, reap=3, time_passes=4, take_sample=4,
)  # fmt: skip


@pytest.mark.parametrize("first, count", [
    (0, 30), *(pytest.param(seed, 30, marks=pytest.mark.thorough) for seed in range(30, 600, 30)),
    pytest.param(600, 20_000, marks=[pytest.mark.soak, pytest.mark.timeout(0)]),
])  # fmt: skip
def test_walks(first, count):
    """Walks of sixty steps. A failure names its seed, for `walk(SEED)`."""
    for seed in range(first, first + count):
        try:
            walk(seed)
        except AssertionError as error:
            raise AssertionError(f"walk({seed}): {error}") from error


def walk(seed: int, steps: int = 60) -> Auditor:
    random = Random(seed)
    auditor = Auditor()

    def some_of(*names: str) -> list[Any]:
        return [random.choice(RANGES[name]) for name in names]

    loaded = ("which", "name", "less", "importance", "droppable")
    auditor.build(
        random.choice([lru, cost_aware]),
        random.randrange(4),
        random.choice(["auto", "always"]),
        random.random() < 0.8,
        [
            (which, name, size + 2, *more)
            for which, name, size, *more in (some_of(*loaded) for _ in range(10))
        ],
    )
    possible = {
        "ask_again": auditor.waiting,
        "time_out": auditor.waiting,
        "interrupt": lambda: any(p.asking for p in auditor.processes.values()),
        "arrive": lambda: any(p.arriving for p in auditor.processes.values()),
        "depart": lambda: any(p.departing for p in auditor.processes.values()),
        "enter": lambda: auditor.models(lambda process, model: model.on_device),
        "exit": lambda: auditor.models(may_exit),
        "give_up": lambda: auditor.models(auditor.may_go),
        "ask_other": lambda: any(auditor.book.leases()),
        "reap": lambda: auditor.dead,
        "die": lambda: len(auditor.processes) == 3,
        "all_obey": lambda: any(ticket.recalls for ticket in auditor.book.tickets),
    }
    # Without some of them, states are reached that are rare in a crowd.
    often = dict(random.sample(list(WEIGHTS.items()), random.choice((len(WEIGHTS), 12))))
    for _ in range(steps):
        names = [name for name in often if name not in possible or possible[name]()]
        names = names or ["time_passes"]
        [name] = random.choices(names, [WEIGHTS[name] for name in names])
        act = getattr(auditor, name)
        act(*some_of(*inspect.signature(act).parameters))
        auditor.no_device_is_over_its_budget()
        auditor.what_is_held_is_in_the_book()
        auditor.evictions_are_offloads_and_unloads()
    auditor.teardown()
    return auditor
