"""What each device has: its level of pressure, the bytes that a grant may spend, and unleased memory.

Pure. For a grant, the smaller of two numbers counts: the budget less all claims in the book, and
the bytes that the driver measured as free. The module `queue` decides which request may spend the
free bytes first. `relief` decides when idle models leave a device that is too full. The levels and
the table of idle times come from Semantik (see `gpu_runtime.verbs`).

Memory that no lease covers is the measured use less the leases and less the residue, which is the
memory of known processes beyond their leases. A process without leases is visible only there. Code
may also use unclaimed memory, for activations and caches. If it uses more than its fraction, torch
raises its own out-of-memory error in this process, and no other process fails.

The book is all leases and requests of a host. A sample is one measurement of a device. A ghost is
the memory that a dead process held and that the driver may not have freed yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ..facts import (
    HOST,
    Book,
    Device,
    DeviceView,
    Event,
    Lease,
    Level,
    Phase,
    Rules,
    Sample,
    Section,
    Share,
    Stranger,
    Value,
    World,
    one_memory,
)
from ..units import show_seconds


class Relief(Value):
    """The rule of a level: evict models that were idle for more than `idle_seconds`."""

    idle_seconds: float
    may_drop: bool  # drop models that cannot be offloaded
    drop: bool  # drop without trying to offload


def level(pressure: float, rules: Rules) -> Level:
    """The level of a `pressure` (1.0 is full), with the thresholds of `rules`.

    By default: LOW < 60 % ≤ MODERATE < 80 % ≤ HIGH < 90 % ≤ CRITICAL.
    """
    if pressure >= rules.critical:
        return Level.CRITICAL
    if pressure >= rules.high:
        return Level.HIGH
    if pressure >= rules.moderate:
        return Level.MODERATE
    return Level.LOW


def relief(at: Level, rules: Rules) -> Relief | None:
    """The rule of the level `at`, with the idle times of `rules`; None at LOW and UNKNOWN."""
    if at is Level.CRITICAL:
        return Relief(0.0, may_drop=True, drop=True)
    if at is Level.HIGH:
        return Relief(rules.idle_high_seconds, may_drop=True, drop=False)
    if at is Level.MODERATE:
        return Relief(rules.idle_moderate_seconds, may_drop=False, drop=False)
    return None


def pressure(claimed: int, limit: int, used: int | None, total: int) -> float:
    """The larger of `claimed` / `limit` and `used` / `total`; above 1 in an overdraft.

    All four numbers are bytes. `used` is None if the driver gives no number.

    >>> pressure(claimed=9_000, limit=14_400, used=None, total=16_000)
    0.625
    """
    claimed_part = claimed / limit if limit else float(claimed > 0)
    if used is None or not total:
        return claimed_part
    return max(claimed_part, used / total)


def sample_of(device: Device, book: Book, world: World) -> Sample | None:
    """The newest known measurement of `device`.

    This owner's own measurements are in `world`, and shared measurements are in `book`. The result
    is None if neither has this device. A simulated device is never measured.
    """
    mine = world.samples.get(device.id)
    theirs = book.samples.get(device.id)
    if mine is None or theirs is None:
        return mine or theirs
    return mine if mine.taken_at >= theirs.taken_at else theirs


def views(book: Book, world: World) -> tuple[DeviceView, ...]:
    """Every device of `world` with its budget, its claims in `book`, used bytes and level."""
    claims, limits = book.claims(), limits_of(book, world)
    return tuple(
        [_view(one, limits[one.id], claims.get(one.id, 0), book, world) for one in world.devices]
    )


def _view(device: Device, limit: int, claimed: int, book: Book, world: World) -> DeviceView:
    sample = sample_of(device, book, world)
    used = claimed if device.simulated else None  # bytes in use as measured; None: unknown
    if not device.simulated and sample is not None and sample.free_bytes is not None:
        used = max(0, device.total_bytes - sample.free_bytes)
    full = pressure(claimed, limit, used, device.total_bytes)
    residue = sum(section.residue.get(device.id, 0) for section in book.sections.values())
    return DeviceView(
        device=device,
        limit_bytes=limit,
        claimed_bytes=claimed,
        measured_bytes=used,
        level=level(full, world.rules),
        pressure=full,
        sample=sample,
        residue_bytes=residue,
        drained=book.drained.get(device.key),
    )


# -- the free bytes that a grant may spend ---------------------------------------------------------


FREEING = ("offloaded", "unloaded", "moved", "lost", "stowed")  # events that free device memory

Bytes = dict[str, int]  # by device id


def limits_of(book: Book, world: World) -> Bytes:
    """The budget of each device of the `world`: the smaller of the book's and this process's limit."""
    limits = {device.id: world.limits.get(device.id, 0) for device in world.devices}
    for id, limit in book.limits.items():
        if id in limits and limit < limits[id]:
            limits[id] = limit
    return limits


def filled_to_size(book: Book, world: World, devices: Collection[str]) -> tuple[Book, World]:
    """The `book` and the `world` in which the `devices` may be filled to their sizes.

    Bytes that return to where they were may use more than the budget (law 16). They never use more
    than a device has: the claims and the measured bytes of all others still count.
    """
    sizes = {device.id: device.total_bytes for device in world.devices if device.id in devices}
    book = replace(book, limits={**book.limits, **sizes})
    return book, replace(world, limits={**world.limits, **sizes})


def room(book: Book, world: World) -> dict[str, int]:
    """Bytes that a grant may spend on each device of the `world`; negative in an overdraft.

    The room is the smaller of two numbers. The first is the device's limit less the claims in the
    `book`. The second is the measured free bytes, less the claimed bytes that the measurement cannot
    have counted. A simulated device has no measurement, so only the first
    number counts. The same holds for a device whose measurement is missing or too old.
    """
    return room_and_blind(book, world)[0]


def room_and_blind(book: Book, world: World) -> tuple[dict[str, int], dict[str, str]]:
    """Two dictionaries by device: the `room` in bytes, and the reason why no grant is possible.

    The dictionary of reasons has only devices whose measurement is missing, incomplete or too old.
    `book` holds the claims; `world` holds the devices, samples and rules.
    """
    samples: dict[str, Sample | None] = {}
    for device in world.devices:
        if not device.simulated:
            samples[device.id] = sample_of(device, book, world)
    taken_at = {id: sample.taken_at for id, sample in samples.items() if sample}
    claims, unseen = _claimed_and_unseen(book, taken_at)

    limits = limits_of(book, world)
    free = {id: limit - claims.get(id, 0) for id, limit in limits.items()}
    blind: dict[str, str] = {}
    for device in world.devices:
        if device.simulated:
            continue
        id, sample = device.id, samples[device.id]
        reason = _why_blind(device, sample, world)
        if reason:
            blind[id] = reason
        else:
            assert sample is not None and sample.free_bytes is not None  # else it is blind
            free[id] = min(free[id], sample.free_bytes - unseen.get(id, 0))

    shared = one_memory(world.devices)
    if shared:
        left = _left_of_one_memory(limits, shared, samples, claims, unseen)
        for id in shared:
            if id in free:
                free[id] = min(free[id], left)
    return free, blind


def _why_blind(device: Device, sample: Sample | None, world: World) -> str:
    """Why no grant can be based on the `sample` of this device; empty if a grant can be."""
    id = device.id
    if sample is None:
        return f"{id} has not been measured yet"
    if sample.free_bytes is None:
        return f"the driver of {id} does not say how much memory is free"
    age = world.now - sample.taken_at
    if age > world.rules.stale_seconds:
        return f"the last measurement of {id} is {show_seconds(age)} old"
    return ""


def _left_of_one_memory(
    limits: Bytes,
    shared: frozenset[str],
    samples: Mapping[str, Sample | None],
    claims: Bytes,
    unseen: Bytes,
) -> int:
    """The bytes left in the machine's RAM, if the host and some cards (`shared`) use it together.

    The result is the smaller of two numbers. The first is the largest of the devices' budgets, less
    all claims on these devices. The second is the measured free bytes, less the `unseen` bytes. The
    second number is left out if no device has been measured.
    """
    left = max(limits.get(id, 0) for id in shared) - sum(claims.get(id, 0) for id in shared)
    measured = []
    for id in shared:
        sample = samples.get(id)
        if sample and sample.free_bytes is not None:
            measured.append(sample.free_bytes)
    if not measured:
        return left
    unseen_bytes = sum(unseen.get(id, 0) for id in shared)
    return min(left, min(measured) - unseen_bytes)


def _claimed_and_unseen(book: Book, taken_at: Mapping[str, float]) -> tuple[Bytes, Bytes]:
    """Bytes claimed on each device, and claimed bytes that the device's sample cannot have counted.

    `taken_at` maps each device to the time of its sample. A sample cannot have counted a lease that
    settled later. The target of a lease that is arriving or moving also counts as unseen, because
    its bytes may appear at any moment.
    """
    claims = book.claims()
    unseen: Bytes = {}
    if not taken_at:
        return claims, unseen
    for ghost in book.ghosts:
        if ghost.device in taken_at and ghost.settled_at >= taken_at[ghost.device]:
            unseen[ghost.device] = unseen.get(ghost.device, 0) + ghost.bytes
    for lease in book.leases():
        _add_unseen(lease, taken_at, unseen)
    return claims, unseen


def _add_unseen(lease: Lease, taken_at: Mapping[str, float], unseen: Bytes) -> None:
    """Adds to `unseen` the bytes of the `lease` that the samples cannot have counted.

    The loops are plain because every decision runs this function.
    """
    for share in lease.shares:
        device, size = share.device, share.bytes
        if device == HOST and lease.disk_bytes:
            size = lease.ram_bytes
        if device in taken_at and lease.settled_at >= taken_at[device]:
            unseen[device] = unseen.get(device, 0) + size
    for share in lease.target:
        device, size = share.device, share.bytes
        if device in taken_at:
            if device == HOST:  # the shadow is there already
                size = max(0, size - lease.shadow_bytes + lease.shadow_beyond_target)
            unseen[device] = unseen.get(device, 0) + size
    if lease.shadow_bytes and HOST in taken_at:
        if lease.phase is Phase.ARRIVING or lease.settled_at >= taken_at[HOST]:
            shared = lease.copied_bytes if lease.phase is Phase.ARRIVING else 0
            unseen[HOST] = unseen.get(HOST, 0) + max(0, lease.shadow_bytes - shared)


def freed_since(book: Book, world: World) -> dict[str, int]:
    """Bytes that leases freed on each device after its sample, plus bytes of dead processes.

    The sample does not show these bytes as free yet, so no grant spends them. But they will be free
    soon, so a request waits for them and evicts nothing. `book` holds the events and the dead
    processes' bytes, `world` the samples.
    """
    freed: Bytes = {}
    for device in world.devices:
        sample = None if device.simulated else sample_of(device, book, world)
        if sample is None:
            continue
        sample_age = world.now - sample.taken_at
        sampled_wall = world.wall - sample_age
        recent = (event for event in book.events if event.wall >= sampled_wall)
        freed[device.id] = sum(_freed_by(event, device.id) for event in recent)
    for ghost in book.ghosts:
        freed[ghost.device] = freed.get(ghost.device, 0) + ghost.bytes
    return freed


def _freed_by(event: Event, device: str) -> int:
    """Bytes that this `event` freed on the given `device`; 0 if the event freed no bytes."""
    if event.action not in FREEING:
        return 0
    shares = event.shares or (Share(event.device, event.bytes),)
    return sum(share.bytes for share in shares if share.device == device)


# -- memory that no lease covers -------------------------------------------------------------------


def stranger_bytes(book: Book, world: World) -> dict[str, int | None]:
    """Bytes in use on each real card of `world` beyond the leases and residue in `book`.

    The value is None if the driver gives no number. Memory that is being freed right now does not
    count. The driver's own use of the card is included: some hundred MiB that belong to no process.
    """
    beyond: dict[str, int | None] = {}
    freed = freed_since(book, world)
    for device in world.cards:
        # Unified memory is the machine's RAM: any program may use it, so it is not counted here.
        if device.simulated or device.unified:
            continue
        sample = sample_of(device, book, world)
        if sample is None or sample.free_bytes is None:
            beyond[device.id] = None
            continue
        used = device.total_bytes - sample.free_bytes
        accounted = freed.get(device.id, 0)
        for section in book.sections.values():
            accounted += _seen_of(section, device.id, sample.taken_at)
        beyond[device.id] = max(0, used - accounted)
    return beyond


def _seen_of(section: Section, device: str, taken_at: float) -> int:
    """Bytes of leases and residue on `device` that a sample taken at `taken_at` includes."""
    seen = section.residue.get(device, 0)
    for lease in section.leases:
        if lease.settled_at < taken_at:
            seen += lease.bytes_on(device)
    return seen


def strangers(
    book: Book, world: World, people: Mapping[int, tuple[str, str]]
) -> tuple[Stranger, ...]:
    """Processes that the driver lists on real cards of `world`, without those in `book`.

    The largest process is first. `people` maps pid -> (user, command), as far as known. In a
    container, the driver's pids differ from the pids in the book. So an owner may be listed here
    under a pid that the book does not know.
    """
    ours = _pids(book)
    found = []
    for device in world.devices:
        for pid, size in _processes(device, book, world).items():
            if pid in ours:
                continue
            user, command = people.get(pid, ("", ""))
            found.append(Stranger(device.id, pid, size, user, command))
    return tuple(sorted(found, key=lambda one: (-(one.bytes or 0), one.device, one.pid)))


def _pids(book: Book) -> set[int]:
    """The pids in the book: owners, their engines, and dead owners that may still hold memory."""
    pids = {ghost.pid for ghost in book.ghosts}
    for section in book.sections.values():
        pids.add(section.owner.pid)
        pids.update(section.engines)
    return pids


def _processes(device: Device, book: Book, world: World) -> dict[int, int | None]:
    """Maps pids to bytes, for the processes that the driver lists on a real card."""
    if device.simulated or device.is_host:
        return {}
    sample = sample_of(device, book, world)
    return sample.processes if sample else {}


# -- how much of each card torch may use in this process -------------------------------------------


LEAST, MOST = 0.01, 0.99
ALL = 1.0


def torch_bounds(
    book: Book,
    owner: str,
    world: World,
    beyond_torch: Mapping[str, int],
    open_cards: Collection[str] = (),
) -> dict[str, float]:
    """The fraction of each real card of `world` that torch may use in the process of `owner`.

    The bound is the whole card, less other owners' claims in `book`, and less the bytes that torch cannot
    take. `beyond_torch` has these bytes of each card, such as the CUDA context. The bound is at
    least the owner's own leases on the card, and at most 99 % of the card.

    If the operator enforces the user's cap, the bound is also at most the cap less what the user's
    other processes hold on the card.

    A card has no bound, and no entry in the result, for one of three reasons: the owner has nothing
    on the card, one of the owner's models is split over several cards, or a block of code sets its
    own bound (`open_cards`).
    """
    section = book.sections.get(owner)
    if section is None:
        return {}
    unbounded = set(open_cards)
    ours: dict[str, int] = {}
    for lease in section.leases:
        if len({share.device for share in lease.shares} - {HOST}) > 1:
            unbounded.update(share.device for share in lease.claims())
        for share in lease.claims():
            ours[share.device] = ours.get(share.device, 0) + share.bytes

    claims = book.claims()
    found = {}
    for device in world.cards:
        leased = ours.get(device.id, 0)
        if device.simulated or not leased or device.id in unbounded:
            continue
        others = claims.get(device.id, 0) - leased - section.residue.get(device.id, 0)
        free = device.total_bytes - others - beyond_torch.get(device.id, 0)
        fraction = max(free, leased) / device.total_bytes
        found[device.id] = min(MOST, max(LEAST, fraction))
    allowed = _enforced(book, owner, world)
    for device in world.devices:
        if device.id in allowed and not device.simulated:
            fraction = max(LEAST, allowed[device.id] / device.total_bytes)
            found[device.id] = min(fraction, found.get(device.id, ALL))
    return found


def _enforced(book: Book, owner: str, world: World) -> dict[str, int]:
    """The bytes of each card that the process of `owner` may hold, if its user's cap is enforced."""
    cap = world.rules.cap
    if cap is None or not cap.enforce or cap.bytes_per_device is None:
        return {}
    allowed = {device.id: cap.bytes_per_device for device in world.cards}
    for id, section in book.sections.items():
        if id == owner or section.owner.user != cap.user:
            continue
        for lease in section.leases:
            for share in lease.claims():
                if share.device in allowed:
                    allowed[share.device] -= share.bytes
    return allowed
