"""What must hold on the simulated box: after every step, while requests wait, at rest, and at the end."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from gpu_runtime.facts import Grant, Phase, Refuse, World
from gpu_runtime.owner import acquire, requests
from gpu_runtime.owner.resident import Place
from gpu_runtime.scheduler import recall, transitions
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.units import show_bytes

from .box import Box, Kernel

LOOK_SECONDS = 0.25  # how often the waiting requests are decided again
# What can be granted is granted within this time, and what others need leaves. With slow messages it takes longer.
GRANTED_SECONDS, SLOWLY_SECONDS = 2.5, 8.0
# How often a waiting request looks by itself. Most days it is seldom, so that a wake-up that was lost shows.
LOOKS_SECONDS = (1.0, 30.0, 30.0)


class Laws:
    """The laws of one day. The first one that is broken is in `problem`."""

    def __init__(self, box: Box) -> None:
        self.box, self.problem = box, ""
        self._asked: dict[str, tuple[Kernel, Any, Any, Any]] = {}  # by key: the newest decision
        self._could: dict[str, float] = {}  # since when a waiting request could be granted
        self._looked_at = 0.0
        self._totals: dict[str, int] = {}
        acquire.admit = self._admit
        requests.POLL_SECONDS = box.machine.random.choice(LOOKS_SECONDS)

    def _admit(self, book: Any, request: Any, world: Any, rank: Any) -> Any:
        """The product's `admit`, whose arguments and verdicts are noted."""
        after, verdict = admit(book, request, world, rank)
        kind = type(verdict).__name__
        self.box.met[f"{kind}: {verdict.kind}" if isinstance(verdict, Refuse) else kind] += 1
        for kernel in self.box.kernels:
            if kernel.process is self.box.machine.current.process:  # type: ignore[union-attr]
                self._asked[request.key] = kernel, request, world, rank
        return after, verdict

    def after_step(self) -> None:
        if self.problem:
            return
        if self.box.changed():
            self._bytes()
            self._sums()
        if self.box.machine.now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = self.box.machine.now
            self._wakes()

    def jumped(self) -> None:
        """The clock has jumped, so nobody has waited as long as it seems."""
        self._could.clear()

    # -- after every step

    def _bytes(self) -> None:
        """No device holds more than it has, and no process holds a byte that the newest page does not claim for it."""
        for device, limit in self.box.limits.items():
            held = self.box.physical(device)
            if sum(held.values()) > limit:
                sizes = ", ".join(f"{who} {show_bytes(size)}" for who, size in held.items() if size)
                self._broken(f"{device} has {show_bytes(limit)}, and holds: {sizes}")
            for kernel in self.box.kernels:
                size = held.get(kernel.process, 0)
                if size > (claimed := self._claimed(kernel, device)):
                    self._broken(
                        f"{kernel.process} holds {show_bytes(size)} on {device}, and the ledger has "
                        f"{show_bytes(claimed)}"
                    )

    def _claimed(self, kernel: Kernel, device: str) -> int:
        section = self.box.book().sections.get(kernel.me)
        return section.claims().get(device, 0) if section is not None else 0

    def _sums(self) -> None:
        """The totals never fall."""
        totals = transitions.totals(self.box.book())
        for name, count in self._totals.items():
            if totals[name] < count:
                self._broken(f"the total of {name} fell from {count} to {totals[name]}")
        self._totals = totals

    def _wakes(self) -> None:
        """A request that can be granted is granted soon: no wake-up was lost."""
        box, now = self.box, self.box.machine.now
        keeper, could = box.keeper, self._could
        self._could = {}
        if keeper is None or keeper.process in box.stopped or not keeper.written:
            return
        if now < box.troubled_until:
            return
        book = box.book()
        waits = [*self._grantable(book), *self._not_obeyed(book)]
        for what in waits:
            since = self._could[what] = could.get(what, now)
            if now - since > (SLOWLY_SECONDS if box.slow else GRANTED_SECONDS):
                self._broken(f"for {now - since:.2f} s {what}")

    def _grantable(self, book: Any) -> Iterator[str]:
        box, now = self.box, self.box.machine.now
        for ticket in book.tickets:
            asked = self._asked.get(ticket.key)
            if ticket.verb != "use" or asked is None:
                continue
            kernel, request, world, rank = asked
            if kernel.closed or kernel.process in box.stopped or kernel.process.killed:
                continue
            if any(one.key == ticket.key for one in book.leases()):
                continue  # it makes room itself
            today = replace(world, now=now, wall=world.wall + now - world.now)
            # What only time has brought about rings no bell: who waits looks by itself.
            if all(isinstance(admit(book, request, at, rank)[1], Grant) for at in (world, today)):
                yield f"{ticket.key} could be granted, and waits"

    def _not_obeyed(self, book: Any) -> Iterator[str]:
        """What an owner could evict for others, while nothing of it moves."""
        if not book.tickets:
            return
        for kernel in self.box.kernels:
            if kernel.rt is None or kernel.closed or kernel.process in self.box.stopped:
                continue
            session = kernel.rt._session
            asker = session.users.get("ann")
            moving = any(one.work.locked() for one in [*session.residents.values()])
            if asker is None or moving or kernel.me not in book.sections:
                continue
            now, wall = session.clock(), session.wall()
            world = World(now, wall, session.probe.devices, session.limits, {}, session.rules)
            askers = {one.key: asker for one in book.tickets if one.owner != kernel.me}
            _, steps, _ = recall.obey(book, kernel.me, world, "law", askers, session.rank)
            yield from [f"{kernel.process} could evict {one.lease}, and does not" for one in steps]

    def _broken(self, what: str) -> None:
        """Notes the problem with the book: a line for each lease, ticket and last event."""
        book = self.box.book()
        leases = [
            f"  {one.id} {one.phase.value} shares={one.shares} target={one.target} filled={one.filled} pins={one.pins}"
            for one in book.leases()
        ]
        tickets = [f"  {one.key} need={one.need} recalls={one.recalls}" for one in book.tickets]
        events = [f"  {event.owner} {event}" for event in book.events[-12:]]
        self.problem = self.problem or "\n".join([what, *leases, *tickets, *events])

    # -- at rest: nobody asks for anything

    def at_rest(self) -> str:
        """What is left over although all requests have ended; empty if nothing is."""
        box, book = self.box, self.box.book()
        found = [f"the request {one.key} is in the book" for one in book.tickets]
        found += [f"{one} is drained" for one in book.drained]
        living = {kernel.me: kernel for kernel in box.kernels if not kernel.closed}
        found += [
            f"the book has {id}, which has ended" for id in book.sections.keys() - living.keys()
        ]
        if box.keeper is not None and box.keeper.core._queue:
            found.append("the keeper has a queue")
        for kernel in living.values():
            found += [f"{kernel.process}: {what}" for what in self._left_in(kernel)]
        found += self._unequal()
        return "; ".join(found)

    def _left_in(self, kernel: Kernel) -> list[str]:
        session = kernel.rt._session
        kept = {
            "keys": session.keys.texts(), "orders": session.orders, "asks": session.standing,
            "loads": session.loads, "blocks": session.blocks,
        }  # fmt: skip
        found = [f"{name} {list(what)}" for name, what in kept.items() if what]
        for name, resident in session.residents.items():
            if resident.place is Place.MOVING or resident.work.locked() or resident.pins:
                found.append(f"{name} is {resident.place} with {len(resident.pins)} pins")
            if resident.pauses or resident.spec.keep:
                found.append(f"{name} pauses or is kept")
        section = self.box.book().sections.get(kernel.me)
        for lease in section.leases if section is not None else ():
            if (
                lease.phase is not Phase.SETTLED
                or lease.pins
                or lease.keep
                or lease.kind != "model"
            ):
                found.append(f"the lease {lease.id} is {lease.phase.value}, pins={lease.pins}")
        return found

    def _unequal(self) -> list[str]:
        """Where a process does not hold exactly the bytes that the ledger has for it."""
        found = []
        for device in self.box.limits:
            held = self.box.physical(device)
            for kernel in self.box.kernels:
                size, claimed = held.get(kernel.process, 0), self._claimed(kernel, device)
                if size != claimed:
                    found.append(
                        f"{kernel.process} holds {show_bytes(size)} on {device}, and the ledger has "
                        f"{show_bytes(claimed)}"
                    )
        return found

    # -- at the end: all runtimes are closed

    def ended(self) -> str:
        """What is left over although all runtimes are closed; empty if nothing is."""
        left = [one.name for one in self.box.machine.threads if one.process is not self._keeper()]
        found = [f"threads: {left}"] if left else []
        found += [f"the book has {id}" for id in self.box.book().sections]
        return "; ".join([*found, *self._unequal()])

    def _keeper(self) -> Any:
        return self.box.keeper and self.box.keeper.process
