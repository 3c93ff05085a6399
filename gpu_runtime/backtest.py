"""Replays a history of uses through the scheduler, with another policy, card size or host memory size.

A history is read from two CSV files or from the journal. `docs/guides/backtest.md` describes the
files and the journal. The journal does not record how long a use took, so every use is assumed to
last `USE_SECONDS`.

The real scheduler decides, and a virtual clock runs. The replayed machine has one card and host
memory. Requests for the same model run at the same time. A model in use is never evicted. Each
granted transfer takes the seconds that the history has for it. A lane is a path for transfers, such
as from the disk to the card, or from the card to host memory. Each lane does one transfer at a time.
With stages, a large model leaves the card in stages, and a waiting model returns in parts meanwhile,
as in `scheduler.admission`. An engine and a notebook leave the card whole. A notebook is never dropped;
if the replay has a disk, its memory may move on from host memory to the disk, and so may a model whose load is slower.

Two policies are always replayed too, with the plain engine. `lru` is the reference. `clairvoyant`
knows when each model is used next, so it shows the most that a better policy could gain.
"""

from __future__ import annotations

import csv
import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from .errors import BadSetting, BadSize, GpuError
from .facts import (
    DISK_BYTES_PER_SECOND,
    DISK_SECONDS_PER_BYTE,
    HOST,
    HOST_BYTES_PER_SECOND,
    IMPORTANCE,
    NORMAL,
    Book,
    Device,
    Drop,
    Event,
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
    decode_uses,
    encode_uses,
    merged_uses,
    parse_importance,
)
from .scheduler import admission, victims
from .scheduler.admission import admit
from .scheduler.policies import POLICIES, policy
from .scheduler.queue import load_seconds, queue
from .scheduler.transitions import after_step
from .units import parse_bytes

# -- the history -----------------------------------------------------------------------------------


GB = 10**9
USE_SECONDS = 1.0  # assumed for each use in the journal, which records only when the use began
# The actions of the events from which uses, bytes and durations are read.
USED = ("loaded", "restored", "offloaded", "unloaded", "lost", "reaped", "released")
REQUEST_FIELDS = ("t_s", "model", "service_s", "importance")
MODEL_FIELDS = (
    "model",
    "size_gb",
    "load_s",
    "restore_s",
    "offload_s",
)  # and `kind`, if it is there
MODEL, ENGINE, NOTEBOOK = KINDS = ("model", "engine", "notebook")
T = TypeVar("T")


class HistoryModel(NamedTuple):
    """A model with its bytes, and the seconds that loading, restoring and offloading take.

    It may also be an engine, which is restored by waking, or a notebook, whose bytes exist nowhere else.
    """

    name: str
    bytes: int
    load_seconds: float  # from disk to the card
    restore_seconds: float  # from host memory to the card
    offload_seconds: float  # from the card to host memory
    kind: str = MODEL  # one of KINDS


class HistoryRequest(NamedTuple):
    """One use of a model."""

    seconds: float  # since the history began
    model: str
    service_seconds: float  # how long the model is in use
    importance: int


class UseHistory(NamedTuple):
    """All models of a history, and their uses in chronological order."""

    models: dict[str, HistoryModel]
    requests: tuple[HistoryRequest, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all models together."""
        return sum(model.bytes for model in self.models.values())

    @property
    def largest(self) -> int:
        """The bytes of the largest model."""
        return max((model.bytes for model in self.models.values()), default=0)


def read_history(requests: str | Path, models: str | Path) -> UseHistory:
    """The history in two CSV files.

    `requests` is the file with the columns t_s, model, service_s, importance. `models` is the file
    with the columns model, size_gb (10⁹ bytes), load_s, restore_s, offload_s, and maybe kind (one of
    KINDS). Raises BadSetting with the file and the line of a mistake.
    """
    known: dict[str, HistoryModel] = {}
    for model in _rows_of(models, MODEL_FIELDS, _model):
        if model.name in known:
            raise BadSetting(str(models), model.name, "described once, and it is there twice")
        known[model.name] = model
    found = list(_rows_of(requests, REQUEST_FIELDS, _request))
    for line, request in enumerate(found, 2):
        if request.model not in known:
            raise BadSetting(
                f"{requests}, line {line}", request.model, f"a model that {models} describes"
            )
    found.sort(key=lambda request: request.seconds)
    return UseHistory(known, tuple(found))


def journal_history(events: Iterable[Event], leases: Iterable[Lease], wall: float) -> UseHistory:
    """The history up to the time `wall`, from the journal's `events` and the present `leases`.

    `wall` is in epoch seconds. If several processes loaded models from the same source, the history
    counts these models as one.
    """
    models: dict[str, _SeenModel] = {}
    for event in events:
        if event.action in USED:
            models.setdefault(event.source or event.model, _SeenModel(event.model)).saw(event)
    for lease in leases:
        if lease.kind == "model" and lease.bytes:
            seen = models.setdefault(lease.source or lease.name, _SeenModel(lease.name))
            seen.bytes = max(seen.bytes, lease.own_bytes)
            seen.uses |= set(decode_uses(lease.recent_uses, wall))
    known = {}
    requests = []
    for seen in models.values():
        if seen.bytes:
            model = seen.model(seen.name if seen.name not in known else f"{seen.name}#{len(known)}")
            known[model.name] = model
            requests += [
                HistoryRequest(float(at), model.name, USE_SECONDS, NORMAL) for at in seen.uses
            ]
    first = min((request.seconds for request in requests), default=0.0)
    moved = [request._replace(seconds=request.seconds - first) for request in requests]
    return UseHistory(known, tuple(sorted(moved)))


class _SeenModel:
    """The uses, bytes and durations of one model, as read from the journal."""

    def __init__(self, name: str) -> None:
        self.name, self.bytes = name, 0
        self.uses: set[int] = set()  # epoch seconds
        self.seconds: dict[str, float] = {}  # "loaded" or "restored" -> the newest duration

    def saw(self, event: Event) -> None:
        """Updates the model's uses, bytes and durations from `event`."""
        if event.action in ("loaded", "restored"):
            self.bytes = max(self.bytes, event.bytes)
            self.uses.add(int(event.wall))
            if event.seconds:
                self.seconds[event.action] = event.seconds
        self.uses |= set(decode_uses(event.uses, event.wall))

    def model(self, name: str) -> HistoryModel:
        """The model under the name `name`.

        A load or a restore that was never measured is estimated from the model's size. The
        duration of an offload is always estimated.
        """
        by_host = self.bytes / HOST_BYTES_PER_SECOND
        return HistoryModel(
            name,
            self.bytes,
            self.seconds.get("loaded") or self.bytes / DISK_BYTES_PER_SECOND,
            self.seconds.get("restored") or by_host,
            by_host,
        )


def _rows_of(
    path: str | Path, fields: tuple[str, ...], parsed: Callable[[dict[str, str]], T]
) -> Iterator[T]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # a spreadsheet may write a BOM
            yield from _parsed(path, csv.DictReader(file), fields, parsed)
    except OSError as error:
        raise BadSetting("the history", str(path), f"a file that can be read ({error})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadSetting("the history", str(path), f"a CSV file in UTF-8 ({error})") from None


def _parsed(
    path: str | Path,
    reader: csv.DictReader[str],
    fields: tuple[str, ...],
    parsed: Callable[[dict[str, str]], T],
) -> Iterator[T]:
    missing = [field for field in fields if field not in (reader.fieldnames or ())]
    if missing:
        raise BadSetting(
            f"the first line of {path}",
            ",".join(reader.fieldnames or ()),
            f"the columns {', '.join(fields)}",
        )
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        if None in row.values():
            raise BadSetting(place, dict(row), f"{len(fields)} values")
        try:
            yield parsed(row)
        except BadSetting as error:
            raise BadSetting(f"{place}, {error.setting}", error.value, error.expected) from None
        except (ValueError, TypeError) as error:
            raise BadSetting(place, dict(row), str(error)) from None


def _model(row: dict[str, str]) -> HistoryModel:
    size = int(_number(row["size_gb"]) * GB)
    if size <= 0:
        raise ValueError("a size_gb above 0")
    kind = row.get("kind") or MODEL
    if kind not in KINDS:
        raise BadSetting("kind", kind, f"one of {', '.join(KINDS)}")
    return HistoryModel(
        row["model"],
        size,
        _number(row["load_s"]),
        _number(row["restore_s"]),
        _number(row["offload_s"]),
        kind,
    )


def _request(row: dict[str, str]) -> HistoryRequest:
    return HistoryRequest(
        _number(row["t_s"]),
        row["model"],
        _number(row["service_s"]),
        parse_importance(row["importance"]),
    )


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:  # refused below
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"a number from 0, not {text or 'empty'}")
    return number


# -- the replay ------------------------------------------------------------------------------------


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
TRANSFERS = {
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
    history: UseHistory,
    card_bytes: int,
    host_bytes: int,
    rank: Policy,
    engine: TransferRules,
    disk_bytes: int = 0,
) -> Result:
    """Replays `history` with this card, host memory, policy (`rank`) and `engine`. Returns the
    measured result.

    `card_bytes` must be at least the bytes of the largest model, and `host_bytes` may be 0. The disk
    takes `disk_bytes` of notebooks, and of models whose load is slower. Raises ValueError if a model of
    the history does not fit onto the card, and GpuError if its notebooks have no room to leave the card.
    """
    if history.largest > card_bytes:
        raise ValueError(f"a card of {card_bytes} bytes cannot hold the largest model")
    return _Replay(history, card_bytes, host_bytes, rank, engine, disk_bytes).run()


class _Replay:
    """The state of one replay. Its book has a single owner, which has the leases of all models."""

    def __init__(
        self,
        history: UseHistory,
        card_bytes: int,
        host_bytes: int,
        rank: Policy,
        engine: TransferRules,
        disk_bytes: int,
    ) -> None:
        self.models, self.requests = history.models, history.requests
        self.rank, self.engine, self.disk_bytes = rank, engine, disk_bytes
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
        """Writes the users and last uses of all models, and the room on the disk, into the book.

        An arriving model keeps its users and last use in the book. A real process also publishes
        before each of its decisions.
        """
        if not self.stale:
            return
        self.stale = False
        leases, now = [], self.book.sections[OWNER.id].leases
        room = max(0, self.disk_bytes - sum([lease.disk_bytes for lease in now]))
        again = sum([lease.disk_bytes for lease in now if lease.droppable])
        rooms = {NOTEBOOK: room, MODEL: max(0, (room + again) // 2 - again)}  # as in owner/disk.py
        for lease in now:
            costs = self.models[lease.name]
            slower = (
                costs.kind == NOTEBOOK or costs.load_seconds > costs.bytes * DISK_SECONDS_PER_BYTE
            )
            left = rooms.get(costs.kind, 0) if slower else 0
            if left != lease.disk_room:
                lease = replace(lease, disk_room=left)
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
        for request in [request for request in self.held if not self._must_yield(request)]:
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
            raise GpuError(
                f"the replay ends after {self.world.now:.0f} s: {verdict.because}\n"
                "  Give its notebooks more RAM, or a disk:  --host SIZE --disk SIZE"
            )
        lane = self._lane(verdict.steps)
        if lane in self.busy:
            return False
        self.book = book
        if not verdict.steps:
            return False
        if isinstance(verdict.steps[0], Load) and self.engine.shadows:
            size, kind = self.models[model].bytes, self.models[model].kind
            if kind == MODEL:
                self.book, _ = victims.reserve_shadow(self.book, OWNER.id, model, size, self.world)
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
        in_parts = self.engine.parts and costs.kind == MODEL  # else it leaves the card whole
        piece_bytes = max(LEAST_PIECE_BYTES, -(-costs.bytes // MOST_PIECES)) if in_parts else 0
        wanted = Lease(
            OWNER.id,
            model,
            importance=min(request.importance for request in waiting),
            recent_uses=self.used.get(model, (0, 0.0, ""))[2],
            reload_seconds=costs.load_seconds,
            restore_seconds=costs.restore_seconds,
            droppable=costs.kind != NOTEBOOK,
            piece_bytes=piece_bytes,
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

    def _seconds(self, step: Step) -> float:
        """The seconds that `step` takes. The call also adds the step to the counters of the result.

        If a step copies only some bytes of a model, its time is reduced in proportion.
        """
        costs = self.models[step.lease.partition("/")[2]]
        lease = self.book.find(step.lease)
        if isinstance(step, Shed) and lease is not None and not lease.shadow_bytes:
            return 2 * lease.stow_bytes / DISK_BYTES_PER_SECOND  # all is written, then compared
        if isinstance(step, (Drop, Shed)):
            return 0.0
        if isinstance(step, Load):
            if costs.kind == NOTEBOOK:  # its own code makes the values
                return 0.0
            self.moved_bytes += costs.bytes
            self.loads += 1
            return costs.load_seconds
        assert lease is not None  # a lease that is moved is in the book
        if step.shares[0].device == HOST:
            moved = replace(lease, target=step.shares).offload_bytes
            self.moved_bytes += moved
            return costs.offload_seconds * moved / costs.bytes
        moved = sum(share.bytes for share in step.shares)
        self.moved_bytes += moved
        self.restores += not admission.is_part(lease)
        return (
            costs.restore_seconds * moved / costs.bytes
            + min(moved, lease.disk_bytes) / DISK_BYTES_PER_SECOND
        )

    def _done(self, lane: str, steps: tuple[Step, ...], more: deque[Step]) -> None:
        """Ends the `steps` of the transfer in `lane`, and starts the steps `more`.

        After the call, the leases are at their destinations, and the waiting users of models that
        are now wholly on the card have started.
        """
        if not more:
            self.busy.discard(lane)
        for step in steps:
            before = self.book.find(step.lease)
            self.book = after_step(self.book, step, self.world)
            self.stale = self.stale or bool(self.disk_bytes)
            name = step.lease.partition("/")[2]
            lease, kind = self.book.lease(OWNER.id, name), self.models[name].kind
            if lease is None or before is None or before.phase is not Phase.ARRIVING:
                continue
            came = before.ram_bytes - lease.ram_bytes
            stays = came if self.engine.shadows and kind == MODEL else 0
            idle = replace(
                lease,
                pins=0,
                importance=LEAST_IMPORTANT,
                droppable=kind != NOTEBOOK,
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


# -- every combination of policy, card, host memory and engine -------------------------------------


CLAIRVOYANT = "clairvoyant"
REFERENCE = ("lru", "plain")
DEVICES = "80GB,10%,20%,40%"
HOSTS = "0GB,20%,50%,100%"
NO_DISK = "0GB"


class BacktestRow(NamedTuple):
    """The result of one replay. Sizes are in bytes, and `wait_*` is in seconds. `wait_vs_lru` is a ratio."""

    policy: str
    engine: str
    device_bytes: int
    host_bytes: int
    requests: int
    wait_s: float
    wait_p50_s: float
    wait_p99_s: float
    loads: int
    restores: int
    moved_bytes: int
    requests_per_s: float  # over the whole replay: what a shorter wait may cost
    wait_vs_lru: float  # against lru on the plain engine; 1.0 if neither waits


def compare(
    history: UseHistory,
    *,
    policies: Sequence[str] = tuple(POLICIES),
    engines: Sequence[str] = ("full",),
    devices: Sequence[str] = tuple(DEVICES.split(",")),
    hosts: Sequence[str] = tuple(HOSTS.split(",")),
    disk: str = NO_DISK,
) -> Iterator[BacktestRow]:
    """Yields one row for each combination of the arguments, as soon as the replay for it has ended.

    `devices`, `hosts` and `disk` are sizes such as `80GB`, or percents of the bytes of all models
    together. A card that is given in percent has at least the bytes of the largest model.

    Raises BadSetting for an unknown policy or engine, for a size that cannot be read, and for a
    card that is smaller than the largest model. Raises GpuError for an empty `history`, and if its
    notebooks have no room to leave the card.
    """
    if not history.requests:
        raise GpuError(
            "there is nothing to replay: the history has no use of a model.\n"
            "  Replay a trace:  gpu backtest --requests FILE --models FILE"
        )
    for name in policies:
        if name not in (*POLICIES, CLAIRVOYANT):
            raise BadSetting("policy", name, f"one of {', '.join(POLICIES)}")
    for name in engines:
        if name not in TRANSFERS:
            raise BadSetting("engine", name, f"one of {', '.join(TRANSFERS)}")
    cards = [_card(text, history) for text in devices]
    memories = [_bytes(text, history, "host") for text in hosts]
    disk_bytes = _bytes(disk, history, "disk")
    for card, memory in product(cards, memories):
        yield from _rows(history, card, memory, disk_bytes, policies, engines)


def _rows(
    history: UseHistory,
    card: int,
    memory: int,
    disk: int,
    policies: Sequence[str],
    engines: Sequence[str],
) -> Iterator[BacktestRow]:
    """The rows for one card size and one host memory size, with the reference row first."""
    choices = [REFERENCE, (CLAIRVOYANT, "plain"), *product(policies, engines)]
    reference = 0.0
    for name, engine in dict.fromkeys(choices):
        rank = _clairvoyant(history) if name == CLAIRVOYANT else policy(name)
        result = replay(history, card, memory, rank, TRANSFERS[engine], disk)
        if (name, engine) == REFERENCE:
            reference = result.wait_seconds
        yield _row(name, engine, card, memory, result, reference)


def _row(
    name: str, engine: str, card: int, memory: int, result: Result, reference: float
) -> BacktestRow:
    waited = result.wait_seconds
    if reference:
        ratio = waited / reference
    else:
        ratio = 1.0 if not waited else float("inf")
    return BacktestRow(
        name,
        engine,
        card,
        memory,
        len(result.waits),
        round(waited, 3),
        round(result.percentile(0.50), 3),
        round(result.percentile(0.99), 3),
        result.loads,
        result.restores,
        result.moved_bytes,
        round(len(result.waits) / result.seconds, 4) if result.seconds else 0.0,
        round(ratio, 4),
    )


def _card(text: str, history: UseHistory) -> int:
    size = _bytes(text, history, "device")
    if text.strip().endswith("%"):
        return max(size, history.largest)
    if size < history.largest:
        largest = max(history.models.values(), key=lambda model: model.bytes)
        raise BadSetting(
            "device", text, f"at least {largest.bytes / 1e9:.1f}GB, the size of {largest.name}"
        )
    return size


def _bytes(text: str, history: UseHistory, what: str) -> int:
    """The bytes of a size such as `80GB`, or of a percentage of the bytes of all models."""
    words = text.strip()
    try:
        if words.endswith("%"):
            share = float(words[:-1]) / 100
            if share < 0 or share != share or share == float("inf"):
                raise ValueError
            return int(history.bytes * share)
        return parse_bytes(words)
    except (BadSize, ValueError):
        raise BadSetting(what, text, "a size such as 80GB, or a percent such as 20%") from None


def _clairvoyant(history: UseHistory) -> Policy:
    """A policy that evicts the model whose next use is farthest in the future."""
    times: dict[str, list[float]] = {}
    for request in history.requests:
        times.setdefault(request.model, []).append(request.seconds)

    def next_use(lease: Lease, world: World) -> float:
        """The rank of `lease`; the lowest rank is evicted first.

        The rank is the negated seconds until the next use, or -inf if there is no later use.
        """
        uses: list[float] = times[lease.name]
        later = bisect_right(uses, world.now)
        return -(uses[later] - world.now) if later < len(uses) else float("-inf")

    return next_use
