"""Computes the free bytes that a grant may spend on each device.

Pure. The smaller of two numbers counts: the budget less all claims in the book, and the bytes that
the driver measured as free. The book is all leases and requests of a host. The module `queue`
decides which request may spend the free bytes first.

A sample is one measurement of a device. A ghost is the memory that a dead process held and that the
driver may not have freed yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ..facts import HOST, Book, Device, Event, Lease, Phase, Sample, Share, World, one_memory
from ..units import show_seconds
from .pressure import sample_of

FREEING = ("offloaded", "unloaded", "moved", "lost")  # events that free device memory

Bytes = dict[str, int]  # by device id


def limit_of(
    book: Book,
    world: World,
    device: str,
) -> int:
    """The budget of a `device` in bytes: the smaller of the book's and this process's limit."""
    own_limit = world.limits.get(device, 0)
    return min(own_limit, book.limits.get(device, own_limit))


def filled_to_size(book: Book, world: World, devices: Collection[str]) -> tuple[Book, World]:
    """The `book` and the `world` in which the `devices` may be filled to their sizes.

    Bytes that return to where they were may use more than the budget (law 16). They never use more
    than a device has: the claims and the measured bytes of all others still count.
    """
    sizes = {one.id: one.total_bytes for one in world.devices if one.id in devices}
    book = replace(book, limits={**book.limits, **sizes})
    rules = replace(world.rules, reserve_bytes=0) if HOST not in devices else world.rules
    return book, replace(world, limits={**world.limits, **sizes}, rules=rules)


def room(book: Book, world: World) -> dict[str, int]:
    """Bytes that a grant may spend on each device of the `world`; negative in an overdraft.

    The room is the smaller of two numbers. The first is the device's limit less the claims in the
    `book`. The second is the measured free bytes, less the reserve, and less the claimed bytes that
    the measurement cannot have counted. A simulated device has no measurement, so only the first
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

    free: Bytes = {}
    blind: dict[str, str] = {}
    for device in world.devices:
        id = device.id
        free[id] = limit_of(book, world, id) - claims.get(id, 0)
        if device.simulated:
            continue
        sample = samples[id]
        reason = _why_blind(device, sample, world)
        if reason:
            blind[id] = reason
        else:
            assert sample is not None and sample.free_bytes is not None  # else it is blind
            measured = sample.free_bytes - world.rules.reserve_bytes - unseen.get(id, 0)
            free[id] = min(free[id], measured)

    shared = one_memory(world.devices)
    if shared:
        left = _left_of_one_memory(
            book,
            world,
            shared,
            samples,
            claims,
            unseen,
        )
        for id in shared:
            if id in free:
                free[id] = min(free[id], left)
    return free, blind


def _why_blind(
    device: Device,
    sample: Sample | None,
    world: World,
) -> str:
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
    book: Book,
    world: World,
    shared: frozenset[str],
    samples: Mapping[str, Sample | None],
    claims: Bytes,
    unseen: Bytes,
) -> int:
    """The bytes left in the machine's RAM, if the host and some cards (`shared`) use it together.

    The result is the smaller of two numbers. The first is the largest of the devices' budgets, less
    all claims on these devices. The second is the measured free bytes, less the reserve and the
    `unseen` bytes. The second number is left out if no device has been measured.
    """
    largest_budget = max(limit_of(book, world, id) for id in shared)
    left = largest_budget - sum(claims.get(id, 0) for id in shared)
    measured = []
    for id in shared:
        sample = samples.get(id)
        if sample and sample.free_bytes is not None:
            measured.append(sample.free_bytes)
    if not measured:
        return left
    unseen_bytes = sum(unseen.get(id, 0) for id in shared)
    return min(left, min(measured) - world.rules.reserve_bytes - unseen_bytes)


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


def on_cards(
    book: Book,
    owner: str,
    *,
    leaving: bool = True,
) -> int:
    """Bytes that the models of one `owner` (its id) claim on all cards together.

    If `leaving` is False, models that are leaving their device are not counted.
    """
    section = book.sections.get(owner)
    if section is None:
        return 0
    total = 0
    for lease in section.leases:
        if lease.kind != "model":
            continue
        if lease.phase is Phase.LEAVING and not leaving:
            continue
        total += sum(share.bytes for share in lease.claims() if share.device != HOST)
    return total
