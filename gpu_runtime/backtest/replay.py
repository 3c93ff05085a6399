"""The replay of a history: the real scheduler decides, and a virtual clock runs.

The replayed machine has one card and host memory. Requests for the same model run at the same time.
A model in use is never evicted. Each granted transfer takes the seconds that the history has for
it. A lane is a path for transfers, such as from the disk to the card, or from the card to host
memory. Each lane does one transfer at a time. With stages, a large model leaves the card in stages,
and a waiting model returns in parts meanwhile, as in `scheduler.admission`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ..facts import (
    HOST,
    IMPORTANCE,
    Book,
    Device,
    Drop,
    Footprint,
    Lease,
    Load,
    Move,
    Owner,
    Phase,
    Policy,
    Refuse,
    Request,
    Rules,
    Section,
    Share,
    Shed,
    Step,
    Ticket,
    World,
    encode_uses,
    merged_uses,
)
from ..scheduler import admission, victims
from ..scheduler.admission import admit
from ..scheduler.queue import load_seconds, queue
from ..scheduler.transitions import perform
from .histories import HistoryRequest, UseHistory

CARD = "card"
LEAST_IMPORTANT = max(IMPORTANCE.values())
OWNER = Owner("replay", "replay", 1, 1)
MOST_PIECES = 40  # of a model: about its layers
LEAST_PIECE_BYTES = 300_000_000


class TransferRules(NamedTuple):
    """How transfers share the replayed machine."""

    name: str
    lanes: tuple[str, ...]  # each does one transfer at a time, beside the others
    most_wait_seconds: float | None  # as in Rules; 0: loads in the order of arrival
    parts: bool = False  # a part of a model can leave the card
    shadows: bool = False  # copies stay in host memory while their models are on the card
    stage_bytes: int = 0  # the least bytes of a stage of a departure or return; 0: no stages
    # A model on the card starts no more calls while another one has waited for `Rules.most_wait`, as
    # in the queue of `gpu serve`.
    bounded: bool = False


FULL = TransferRules(
    "full",
    ("disk", "host", "out"),
    most_wait_seconds=None,
    parts=True,
    shadows=True,
    stage_bytes=LEAST_PIECE_BYTES,
)
ENGINES = {
    "plain": TransferRules("plain", ("any",), most_wait_seconds=0.0),
    "full": FULL,
    "bounded": FULL._replace(name="bounded", bounded=True),
}


class Result(NamedTuple):
    """What the replay measured."""

    waits: tuple[float, ...]  # seconds between each request and its start, sorted
    loads: int
    restores: int
    moved_bytes: int
    seconds: float = 0.0  # from the first request to the end of the last one

    @property
    def wait_seconds(self) -> float:
        """The sum of the waiting times of all requests."""
        return sum(self.waits)

    def percentile(self, fraction: float) -> float:
        """The waiting time in seconds that a `fraction` of the requests does not exceed."""
        if not self.waits:
            return 0.0
        return self.waits[min(len(self.waits) - 1, int(fraction * len(self.waits)))]


def replay(
    history: UseHistory, card_bytes: int, host_bytes: int, rank: Policy, engine: TransferRules
) -> Result:
    """Replays `history` with this card, host memory, policy (`rank`) and `engine`. Returns the
    measured result.

    `card_bytes` must be at least the bytes of the largest model, and `host_bytes` may be 0. Raises
    ValueError if a model of the history does not fit onto the card.
    """
    if history.largest > card_bytes:
        raise ValueError(f"a card of {card_bytes} bytes cannot hold the largest model")
    return _Replay(history, card_bytes, host_bytes, rank, engine).run()


class _Replay:
    """The state of one replay. Its book has a single owner, which has the leases of all models."""

    def __init__(
        self,
        history: UseHistory,
        card_bytes: int,
        host_bytes: int,
        rank: Policy,
        engine: TransferRules,
    ) -> None:
        self.models, self.requests = history.models, history.requests
        self.rank, self.engine = rank, engine
        limits = {CARD: card_bytes, HOST: host_bytes}
        devices = tuple(Device(id, size, simulated=True) for id, size in limits.items())
        rules = Rules(refresh_seconds=float("inf"), most_wait_seconds=engine.most_wait_seconds)
        self.world = World(0.0, 0.0, devices, limits, rules=rules)
        self.book = Book(devices=devices, limits=limits).with_section(Section(OWNER))
        # model -> number of users, time of the last use, encoded times of recent uses
        self.used: dict[str, tuple[int, float, str]] = {}
        self.stale = False  # True: `used` has changed since `_publish` wrote it into the book
        self.waiting: dict[str, list[HistoryRequest]] = {}
        self.held: list[HistoryRequest] = []  # their models are on the card, and others are first
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = 0
        self.busy: set[str] = set()  # lanes with a transfer
        self.waits: list[float] = []
        self.loads = self.restores = self.moved_bytes = 0

    def run(self) -> Result:
        """Replays all requests, until the last request has ended. Returns the measured result."""
        arrivals = deque(self.requests)
        while arrivals or self.events:
            if not self.events or (arrivals and arrivals[0].seconds < self.events[0][0]):
                request = arrivals.popleft()
                self._advance(request.seconds)
                self._arrive(request)
            else:
                seconds, _, happen = heapq.heappop(self.events)
                self._advance(seconds)
                happen()
        assert not self.waiting and not self.held, f"never served: {sorted(self.waiting)}"
        self.waits.sort()
        seconds = self.world.now - self.requests[0].seconds if self.requests else 0.0
        return Result(tuple(self.waits), self.loads, self.restores, self.moved_bytes, seconds)

    def _advance(self, seconds: float) -> None:
        self.world = replace(self.world, now=seconds, wall=seconds)

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.world.now + seconds, self.serial, happen))

    # -- using a model

    def _arrive(self, request: HistoryRequest) -> None:
        """Starts the `request` at once if its model is on the card. If not, the request waits.

        It also waits if another request of the same importance has waited for too long.
        """
        lease = self.book.lease(OWNER.id, request.model)
        if lease and lease.all_on_device and lease.phase is Phase.SETTLED:
            if self._must_yield(request):
                self.held.append(request)
            else:
                self._start(request)
            return
        waiting = self.waiting.setdefault(request.model, [])
        waiting.append(request)
        self._queue(request.model)
        self._decide()

    def _must_yield(self, request: HistoryRequest) -> bool:
        if not self.engine.bounded:
            return False
        now, rules = self.world.now, self.world.rules
        return any(
            ticket.name != request.model
            and ticket.importance <= request.importance
            and now - ticket.arrived >= rules.most_wait(ticket.seconds)
            for ticket in self.book.tickets
        )

    def _queue(self, model: str) -> None:
        """Writes a ticket (a waiting request in the book) for the users that wait for `model`.

        If a transfer already loads or restores the model, no ticket is written.
        """
        lease = self.book.lease(OWNER.id, model)
        if lease is not None and lease.phase is Phase.ARRIVING:
            return
        request = self._request(model)
        old = self.book.ticket(model) or Ticket(
            model,
            OWNER.id,
            "use",
            model,
            request.arrived,
            self.world.now,
            seconds=load_seconds(self.book, request),
        )
        importance = request.lease.importance
        self.book = self.book.with_ticket(replace(old, users=request.users, importance=importance))

    def _start(self, request: HistoryRequest) -> None:
        self.waits.append(self.world.now - request.seconds)
        self._use(request.model, +1, request.seconds)
        self._after(request.service_seconds, partial(self._end, request.model))

    def _end(self, model: str) -> None:
        self._use(model, -1)
        if not self.used[model][0]:
            self._decide()

    def _use(self, model: str, change: int, requested: float | None = None) -> None:
        """Adds `change` (1 or -1) to the users of `model`, and sets the time of its last use to now.

        If a use starts, `requested` is the time of its request, which is added to the recent uses.
        """
        users, _, uses = self.used.get(model, (0, 0.0, ""))
        now = self.world.now
        if requested is not None:
            uses = merged_uses((uses, encode_uses([requested])), now)
        self.used[model] = (users + change, now, uses)
        self.stale = True

    def _publish(self) -> None:
        """Writes the users and the last uses of all models into the book, for the scheduler.

        An arriving model keeps its users and last use in the book. A real process also publishes
        before each of its decisions.
        """
        if not self.stale:
            return
        self.stale = False
        leases = []
        for lease in self.book.sections[OWNER.id].leases:
            users, last, uses = self.used.get(lease.name, (0, 0.0, ""))
            if (users, last) != (lease.pins, lease.last_used) and lease.phase is not Phase.ARRIVING:
                lease = replace(lease, pins=users, last_used=last, recent_uses=uses)
            leases.append(lease)
        self.book = self.book.with_section(Section(OWNER, tuple(leases)))

    # -- deciding

    def _decide(self) -> None:
        """Starts every transfer that the scheduler grants now and whose lane is free."""
        while self.waiting and len(self.busy) < len(self.engine.lanes):
            self._publish()
            if not any(self._try(model) for model in self._in_order()):
                break
        for request in [one for one in self.held if not self._must_yield(one)]:
            self.held.remove(request)
            self._arrive(request)

    def _in_order(self) -> list[str]:
        """The models that have waiting requests and no transfer now, in the queue's order."""
        moving = {lease.name for lease in self.book.leases() if lease.phase is not Phase.SETTLED}
        order = queue(self.book, self.world)
        return [ticket.name for ticket in order if ticket.name not in moving]

    def _try(self, model: str) -> bool:
        """Requests room for `model` from the scheduler. Returns whether a transfer was started."""
        arrival = self._lane_of_arrival(model)
        if arrival in self.busy and (arrival != "host" or "out" in self.busy):
            return False  # else models would be evicted for a load that cannot start yet
        request = self._request(model)
        book, verdict = admit(self.book, request, self.world, self.rank)
        if isinstance(verdict, Refuse):
            raise AssertionError(verdict.because)
        lane = self._lane(verdict.steps)
        if lane in self.busy:
            return False
        self.book = book
        if not verdict.steps:
            return False
        if isinstance(verdict.steps[0], Load) and self.engine.shadows:
            self._reserve_shadow(model)
        self.busy.add(lane)
        self._start_steps(lane, deque(verdict.steps))
        return True

    def _start_steps(self, lane: str, steps: deque[Step]) -> None:
        """Starts the first of the `steps` in this `lane`.

        If the first step offloads a large model in stages, only its first stage starts. Any other
        first step starts together with all steps before the next such offload, as one transfer.
        """
        stage = self._stage_bytes(steps[0])
        if stage:
            self._start_stage(lane, steps, stage)
            return
        now = [steps.popleft()]
        while steps and not self._stage_bytes(steps[0]):
            now.append(steps.popleft())
        seconds = sum(self._seconds(step) for step in now)
        self._after(seconds, partial(self._done, lane, tuple(now), steps))

    def _stage_bytes(self, step: Step) -> int:
        lease = self.book.find(step.lease)
        if not isinstance(step, Move) or lease is None:
            return 0
        return admission.departure_stages(lease, step.shares, self.engine.stage_bytes)

    def _start_stage(self, lane: str, steps: deque[Step], stage: int) -> None:
        """Starts the next stage of the first of the `steps`, which offloads a large model.

        A stage moves `stage` bytes to host memory. The last stage moves all bytes that are left:
        fewer than 2 * `stage` bytes.
        """
        step = steps[0]
        lease = self.book.find(step.lease)
        assert isinstance(step, Move) and lease is not None  # else it has no stages
        left = lease.leaving_bytes
        if left < 2 * stage:
            steps.popleft()
            rest = replace(step, shares=lease.target)
            self._after(self._seconds(rest), partial(self._done, lane, (rest,), steps))
            return
        part = replace(step, shares=(Share(HOST, stage),))
        ended = partial(self._stage_done, lane, steps, part, stage)
        self._after(self._seconds(part), ended)

    def _stage_done(self, lane: str, steps: deque[Step], part: Move, stage: int) -> None:
        """Ends a stage: its bytes are free now. Starts the next stage."""
        lease = self.book.find(part.lease)
        assert lease is not None  # it is leaving
        self.book = admission.part_left(self.book, part, lease.after(part.shares), self.world)
        self._start_stage(lane, steps, stage)
        self._decide()

    def _reserve_shadow(self, model: str) -> None:
        """Reserves host memory for a copy of the `model` that is being loaded, if the host has
        room.
        """
        size = self.models[model].bytes
        self.book, _ = victims.reserve_shadow(self.book, OWNER.id, model, size, self.world)

    def _lane_of_arrival(self, model: str) -> str:
        """The lane of the transfer that brings `model` to the card."""
        if len(self.engine.lanes) == 1:
            return self.engine.lanes[0]
        lease = self.book.lease(OWNER.id, model)
        return "host" if lease is not None and not lease.all_on_device else "disk"

    def _lane(self, steps: tuple[Step, ...]) -> str:
        """The lane for `steps`, which bring a model to the card or take models off the card.

        The first step decides: the lane is `disk` for a load, `host` for a restore, else `out`. An
        engine with one lane uses it for all steps.
        """
        if len(self.engine.lanes) == 1 or not steps:
            return self.engine.lanes[0]
        if isinstance(steps[0], Load):
            return "disk"
        arrives = isinstance(steps[0], Move) and steps[0].shares[0].device != HOST
        return "host" if arrives else "out"

    def _request(self, model: str) -> Request:
        """One request for `model` on behalf of all its waiting users.

        The request has the time of arrival of the user who has waited longest.
        """
        costs, waiting = self.models[model], self.waiting[model]
        wanted = Lease(
            OWNER.id,
            model,
            importance=min(request.importance for request in waiting),
            recent_uses=self.used.get(model, (0, 0.0, ""))[2],
            reload_seconds=costs.load_seconds,
            restore_seconds=costs.restore_seconds,
            droppable=True,
            piece_bytes=self._piece_bytes(costs.bytes),
        )
        leaving = [lease.id for lease in self.book.leases() if lease.phase is Phase.LEAVING]
        return Request(
            model,
            wanted,
            Footprint.of(costs.bytes),
            waiting[0].seconds,
            users=len(waiting),
            stage_bytes=self.engine.stage_bytes,
            under_way=tuple(leaving) if self.engine.stage_bytes else (),
        )

    def _piece_bytes(self, size: int) -> int:
        """The bytes of a piece of a model of `size` bytes; 0 if models leave the card whole."""
        return max(LEAST_PIECE_BYTES, -(-size // MOST_PIECES)) if self.engine.parts else 0

    def _seconds(self, step: Step) -> float:
        """The seconds that `step` takes. The call also adds the step to the counters of the result.

        If a step copies only some bytes of a model, its time is reduced in proportion.
        """
        costs = self.models[step.lease.partition("/")[2]]
        if isinstance(step, (Drop, Shed)):
            return 0.0
        if isinstance(step, Load):
            self.moved_bytes += costs.bytes
            self.loads += 1
            return costs.load_seconds
        lease = self.book.find(step.lease)
        assert lease is not None  # a lease that is moved is in the book
        if step.shares[0].device == HOST:
            moved = replace(lease, target=step.shares).offload_bytes
            self.moved_bytes += moved
            return costs.offload_seconds * moved / costs.bytes
        moved = sum(share.bytes for share in step.shares)
        self.moved_bytes += moved
        self.restores += not admission.is_part(lease)
        return costs.restore_seconds * moved / costs.bytes

    def _done(self, lane: str, steps: tuple[Step, ...], more: deque[Step]) -> None:
        """Ends the `steps` of the transfer in `lane`, and starts the steps `more`.

        After the call, the leases are at their destinations, and the waiting users of models that
        are now wholly on the card have started.
        """
        if not more:
            self.busy.discard(lane)
        for step in steps:
            before = self.book.find(step.lease)
            self.book = perform(self.book, step, self.world)
            name = step.lease.partition("/")[2]
            lease = self.book.lease(OWNER.id, name)
            if lease is None or before is None or before.phase is not Phase.ARRIVING:
                continue
            came = before.bytes_on(HOST) - lease.bytes_on(HOST)
            stays = came if self.engine.shadows else 0
            idle = replace(
                lease,
                pins=0,
                importance=LEAST_IMPORTANT,
                droppable=True,
                shadow_bytes=lease.shadow_bytes + stays,
            )
            self.book = self.book.with_lease(idle)
            if not lease.all_on_device:
                continue
            for request in self.waiting.pop(name, ()):
                self._start(request)
        if more:
            self._start_steps(lane, more)
        self._decide()
