"""What must hold on the simulated box: after every step, while requests wait, at rest, and at the end."""

import gc
import logging
import math
import re
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from gpu_runtime.errors import LedgerRefused
from gpu_runtime.facts import HOST, Drop, Grant, Move, Phase, Refuse, Sample, Share, Wait, World
from gpu_runtime.ledgers.keeper import ledger as clients
from gpu_runtime.owner import acquire, failures, maintenance, requests
from gpu_runtime.owner.resident import Place
from gpu_runtime.scheduler import admission, caps, recall, transitions
from gpu_runtime.scheduler.admission import admit
from gpu_runtime.scheduler.feasibility import deadlocked
from gpu_runtime.scheduler.queue import FAIR_SECONDS, Context, requests_ahead
from gpu_runtime.units import GIB, show_bytes

from .box import NO_THREAD, Box, Kernel
from .disk import Disk, file_of

LOOK_SECONDS = 0.5  # how often the waiting requests are decided again
# What can be granted is granted within this time, and what others need leaves. With slow messages it takes longer.
GRANTED_SECONDS, SLOWLY_SECONDS = 2.5, 8.0
# How often a waiting request and a monitor look by themselves. Most days it is seldom: a wake-up that was lost shows.
LOOKS_SECONDS = (1.0, 30.0, 30.0)
GROWN_SECONDS = 30.0  # so long after other programs took memory a grant may meet too little of it
MOST_IN_VAIN, IN_VAIN_SECONDS = 200, 2.0  # writes of requests that wait, while nothing else changes
MOST_TRIES = 8  # of a load that runs out of memory, even if parts of the model return meanwhile
carry_out_order, refuse_unlawful = maintenance.carry_out_order, clients.refuse_unlawful
grants, evict_idle = acquire.grants, failures.evict_idle
transact, make_put = clients.KeeperLedger.transact, clients.KeeperLedger._put
follow = clients.KeeperLedger._follow


class Log(logging.Handler):
    """The log of all processes. An error with a traceback is one that nobody expected."""

    broken: Any = print

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and str(record.exc_info[1]) != NO_THREAD:
            Log.broken(f"{record.getMessage()}: {record.exc_info[1]!r}")


log = logging.getLogger("gpu_runtime")
log.addHandler(Log())
log.propagate = False


class Laws:
    """The laws of one day. The first one that is broken is in `problem`."""

    def __init__(self, box: Box, slow: bool) -> None:
        """With `slow`, nobody looks often, so that hours pass quickly."""
        self.box, self.problem = box, ""
        self._asked: dict[str, tuple[Kernel, Any, Any, Any]] = {}  # by key: the newest decision
        self._could: dict[str, float] = {}  # since when what must happen could have happened
        self._looked_at, self._made, self._jumped_at = 0.0, 0, 0.0
        self._stay: set[str] = set()  # the dead that nobody has removed at rest
        self._totals: dict[str, int] = {}
        self._before = box.book()
        self._written: Any = None  # the page at the last step
        self._held: dict[Any, Any] = {}  # by process: its bytes and its section at its last step
        self._first: dict[
            str, tuple[Any, ...]
        ] = {}  # by key: what was decided last, and the verdict
        self._in_vain: deque[float] = deque(maxlen=MOST_IN_VAIN)  # writes that change nothing
        self._judged: set[Any] = set()  # sets of leases that leave for a request
        self._ends: dict[str, float] = {}  # by key: when the time of a request is over
        self._tries: Counter[Any] = Counter()  # by thread: how often it made room for a failed load
        self._sent: dict[Any, int] = {}  # by thread: the number of the write that it makes now
        acquire.admit = self._admit
        acquire.grants, failures.evict_idle = self._grants, self._evict_idle
        for name, law in {
            "transact": self._transact, "_put": self._put, "_follow": self._follow
        }.items():  # fmt: skip
            setattr(clients.KeeperLedger, name, lambda *given, law=law: law(*given))
        clients.refuse_unlawful = self._refuse_unlawful
        maintenance.carry_out_order = self._carry_out_order
        Log.broken = self._broken
        looks = 60.0 if slow else box.machine.random.choice(LOOKS_SECONDS)
        looks = 1.0 if box.driver else looks  # what a driver tells rings no bell
        requests.POLL_SECONDS = maintenance.POLL_SECONDS = looks
        if slow:  # who waits for a use of its own process looks often
            requests.NEAR_SECONDS = maintenance.NEAR_SECONDS = acquire.NEAR_SECONDS = 2.0
        maintenance.DOZE_SECONDS = 300.0 if slow else max(12.0, 2 * looks)
        maintenance.TICKS_A_SECOND = 6 if looks == 1 else 1e-3

    def _admit(self, book: Any, request: Any, world: Any, rank: Any) -> Any:
        """The product's `admit`, whose arguments and verdicts are noted."""
        after, verdict = admit(book, request, world, rank)
        self._victims(book, after, request, world, rank, verdict)
        self._order(book, request, world, rank, verdict)
        kind = type(verdict).__name__
        self.box.met[f"{kind}: {verdict.kind}" if isinstance(verdict, Refuse) else kind] += 1
        for kernel in self.box.kernels:
            if kernel.process is self.box.machine.current.process:  # type: ignore[union-attr]
                self._asked[request.key] = kernel, request, world, rank
        return after, verdict

    def _victims(
        self, book: Any, after: Any, request: Any, world: Any, rank: Any, verdict: Any
    ) -> None:
        """Law 8: victims are chosen by importance, then pruned.

        It is judged while all models may be loaded again: else the room in host memory decides too.
        """
        ticket, steps = after.ticket(request.key), ()
        going = (
            _recalled(ticket) if ticket else {}
        )  # by lease: where its bytes go; nowhere if empty
        if isinstance(verdict, Wait):
            steps = verdict.steps
            going |= {one.lease: one.shares for one in steps if isinstance(one, Move)}
            going |= {one.lease: () for one in steps if isinstance(one, Drop)}
        leases = {lease.id: lease for lease in book.leases()}
        able = [lease for lease in leases.values() if lease.phase is Phase.SETTLED]
        chosen = {one.id for one in able if one.id in going and one.on_device}
        known = (request.key, *sorted((id, going[id]) for id in chosen))
        if not chosen or known in self._judged or book.entries >= admission.MOST_LEASES:
            return
        self._judged.add(known)
        if not all(lease.droppable or lease.kind == "block" for lease in leases.values()):
            return
        context = Context(book, request, world)
        host_left = self.box.limits[HOST] - book.claims().get(HOST, 0) - request.stage_bytes
        host_left -= sum(leases[id].card_bytes for id in chosen)
        for step in steps:
            if isinstance(step, Drop) and leases[step.lease].all_on_device and host_left >= 0:
                self._broken(f"{step.lease} is dropped for {request.key}, and RAM has room for it")
        for one in context.blocking:  # what they have recalled leaves in any case
            going = _recalled(one) | going
        users = caps.owners_of(book, world.rules.cap)
        capped = {id for id in context.recalled if id.partition("/")[0] in users}
        if capped or not self._is_seen(book, world):
            return  # what others recall of this user counts against the cap until it has left

        def enough_on(leave: dict[str, Any]) -> set[str]:
            """The cards of the whole grant, once these have left; empty if they are not enough."""
            then = _without(book, leave, context.blocking)
            found, verdict = admit(then, request, self._measured(then, world), rank)
            if isinstance(verdict, Grant) and found.ticket(request.key) is None:
                return {share.device for share in verdict.lease.target}
            return set()

        self.box.met["victims judged"] += 1
        for id in chosen:
            lease, fewer = leases[id], {one: to for one, to in going.items() if one != id}
            if lease.in_parts and not going[id]:
                continue  # it may leave for its bytes in host memory
            leaves = sum(share.bytes for share in going[id])
            less = (leaves or lease.card_bytes) - lease.piece_bytes
            in_parts = (
                lease.piece_bytes and ticket and len(ticket.need) == 1
            )  # else whole leases leave
            # A model leaves as a whole if RAM has no room for its pieces, before others have left it.
            if in_parts and less > 0 and host_left >= 0:
                fewer[id] = (Share(HOST, less),)
            if ticket and enough_on(fewer) == {share.device for share in ticket.need}:
                self._broken(f"{id} leaves for {request.key} in vain: {going}")
        most, asker = min(leases[id].importance for id in chosen), request.lease
        others = {id: to for id, to in going.items() if id not in chosen}
        for lease in able:
            grace = 0.0 if lease.owner == asker.owner else world.rules.grace_seconds
            rests = world.now >= max(lease.moves_again_at, lease.last_used + grace)
            if lease.importance > most and lease.kind == "model" and rests and not (
                lease.pins or lease.keep or lease.id in context.silent or lease.id == asker.id
            ):  # fmt: skip
                others.setdefault(lease.id, ())
        if enough_on(others):
            self._broken(f"{chosen} leave for {request.key}, and less important ones are enough")

    def _order(self, book: Any, request: Any, world: Any, rank: Any, verdict: Any) -> None:
        """Nobody is passed for ever, and nobody waits for a request that cannot go on."""
        rules, now = world.rules, world.now
        others = [
            one
            for one in book.tickets
            if one.verb == "use" and one.key != request.key and rules.awake(one, now)
        ]
        for one in others:
            enough = max(FAIR_SECONDS, rules.most_wait(one.seconds))
            if one.arrived < request.arrived and now - one.arrived >= enough:
                if one not in requests_ahead(book, request, world):
                    self._broken(f"{request.key} is ahead of {one.key}, which came long before")
        blocked = [one for one in others if one.blocked_since]
        if not blocked or request.held or book.entries >= admission.MOST_LEASES:
            return
        late = [one for one in blocked if now - one.blocked_since >= rules.passing_seconds]
        then = book
        if isinstance(verdict, Grant) and verdict.steps:
            for one in late:
                then = then.with_ticket(replace(one, blocked_since=0.0))
            what = "passes requests that are blocked for long"
        elif isinstance(verdict, Wait) and not (verdict.steps or verdict.asked):
            for one in blocked:
                then = then if one in late else then.with_ticket(replace(one, need=()))
            what = "waits behind requests that are blocked"
        if then is not book:
            self.box.met["order judged"] += 1
            if isinstance(verdict, Grant) != isinstance(
                admit(then, request, world, rank)[1], Grant
            ):
                self._broken(f"{request.key} {what}")

    def _is_seen(self, book: Any, world: Any) -> bool:
        """Whether the samples show all that is in use, and only that."""
        driver = self.box.driver
        if driver is None:
            return True
        if (
            not driver.is_well
            or book.ghosts
            or any(lease.phase is Phase.ARRIVING for lease in book.leases())
        ):
            return False
        if driver.late or world.now <= max(driver.grew.values()) + GROWN_SECONDS:
            return False
        after = self._measured(
            book, world
        ).samples  # what has left since the measurement is not free in it
        return all(one.free_bytes == after[card].free_bytes for card, one in world.samples.items())

    def _measured(self, book: Any, world: Any) -> Any:
        """The `world` once the driver has measured the `book`."""
        if self.box.driver is None:
            return world
        now, samples = world.now + 1e-3, {}
        for card, foreign in self.box.driver.foreign.items():
            held = sum(lease.bytes_on(card) for lease in book.leases())
            samples[card] = Sample(card, now, self.box.limits[card] - held - foreign)
        return replace(world, now=now, samples=samples)

    def _refuse_unlawful(self, *write: Any, unsent: bool = False) -> None:
        """No owner decides what may not be written."""
        try:
            refuse_unlawful(*write, unsent=unsent)
        except LedgerRefused as error:
            self._broken(str(error))
            raise

    def _grants(self, session: Any, key: Any, *wanted: Any) -> Any:
        """The product's `grants`, of which the end of the time is noted."""
        if (timeout := wanted[3]) is not None:
            self._ends[key.text] = session.clock() + timeout
        self._tries.pop(self.box.machine.current, None)
        return grants(session, key, *wanted)

    def _evict_idle(self, *given: Any, **wishes: Any) -> Any:
        """A load that runs out of memory again and again ends with an error."""
        self._tries[self.box.machine.current] += 1
        if self._tries[self.box.machine.current] > MOST_TRIES:
            self._broken(f"a model is loaded again after {MOST_TRIES} errors: {given[2]}")
        return evict_idle(*given, **wishes)

    def _transact(self, client: Any, decide: Any) -> Any:
        """What a write has decided is in the book when the call returns, and is decided once."""
        thread, me = self.box.machine.current, client.owner.id

        def deciding(book: Any) -> Any:
            if _puts(client._pieces).get(me) == self._sent.pop(thread, -1):
                self._broken(f"{me} decides again, and its write is in the book")
            return decide(book)

        self._sent.pop(thread, None)
        answer = transact(client, deciding)
        number = self._sent.pop(thread, 0)
        keeper = self.box.keeper
        if keeper is not None and _puts(keeper.core.known).get(me, 0) < number:
            self._broken(f"{me} takes a write for made that no keeper has")
        return answer

    def _put(self, client: Any, number: int, old: Any, new: Any) -> Any:
        if client.owner.id in new.sections:  # else it leaves the book, and nothing shows the number
            self._sent[self.box.machine.current] = number
        return make_put(client, number, old, new)

    def _follow(self, client: Any) -> Any:
        """Who reads a page reads what the keeper has written."""
        pieces, written = follow(client), self.box.keeper and self.box.keeper.written
        same = not written or written.revision != pieces.revision
        if not same and _puts(written) != _puts(pieces):
            self._broken(f"{client.owner.id} reads another page {pieces.revision} than was written")
        return pieces

    def _carry_out_order(self, session: Any, order: Any) -> None:
        """Every order of another owner gets an answer, unless the ledger cannot be written."""
        carry_out_order(session, order)
        if session.orders.get(order.key, "gone") is None and not session.closed:
            self._broken(f"{session.me} does not answer {order.verb} {order.name} of {order.key}")

    def after_step(self) -> None:
        if self.problem:
            return
        if self.box.met["Refused"]:  # each owner checks the laws before it writes
            self._broken("the keeper refuses a write")
        if hung := self.box.hung:
            self.box.hung = ""
            calm = self.box.machine.now > self._jumped_at + 2 * clients.HANGING_SECONDS
            if calm and not self.box.slow and not self.box.stopped:
                self._broken(f"{hung} ends a keeper that runs, since it does not answer")
        # A step changes the bytes of its own process at most, and the book if the keeper has written.
        written = self.box.keeper and self.box.keeper.written
        if written is None or written is not self._written:
            self._written = written
            self._bytes(self.box.kernels)
            self._cap()
            self._sums()
            self._departures()
        else:
            stepped = self.box.machine.stepped
            self._bytes([one for one in self.box.kernels if one.process is stepped])
        disk = Disk.active
        if disk.made != self._made:
            self._made = disk.made
            if disk.bytes() > disk.budget * GIB:
                self._broken(f"{show_bytes(disk.bytes())} are on a disk of {disk.budget} GiB")
        if self.box.machine.now >= self._looked_at + LOOK_SECONDS:
            self._looked_at = self.box.machine.now
            self._wakes()

    def jumped(self) -> None:
        """The clock has jumped, so nobody has waited as long as it seems."""
        self._could.clear()
        self._jumped_at = self.box.machine.now

    # -- after every step

    def _bytes(self, kernels: list[Kernel]) -> None:
        """No device holds more than it has, and no process holds a byte that the newest page does not claim for it."""
        driver = self.box.driver
        if driver and (card := driver.refused):
            driver.refused = ""
            if driver.is_well and self.box.machine.now - driver.grew[card] > GROWN_SECONDS:
                self._broken(
                    f"{card} refuses memory that was granted, and other programs took none"
                )
        for kernel in kernels:
            held, section = kernel.held(), self.box.book().sections.get(kernel.me)
            before, known = self._held.get(kernel.process, (None, None))
            if held is before and section is known:
                continue
            self._held[kernel.process] = held, section
            claims = self._claims(kernel)
            if driver and driver.late and held is not before:
                driver.follow()
            for device, size in held.items():
                if size > claims.get(device, 0):
                    self._broken(
                        f"{kernel.process} holds {show_bytes(size)} on {device}, and the ledger has "
                        f"{show_bytes(claims.get(device, 0))}"
                    )
                if held is not before:
                    self._fits(device)

    def _fits(self, device: str) -> None:
        held, limit = self.box.physical(device), self.box.limits[device]
        if sum(held.values()) > limit:
            sizes = ", ".join(f"{who} {show_bytes(size)}" for who, size in held.items() if size)
            self._broken(f"{device} has {show_bytes(limit)}, and holds: {sizes}")

    def _cap(self) -> None:
        """The user with a cap has no more of a card, in all processes together."""
        sections = self.box.book().sections.values() if self.box.cap else ()
        claims = [
            share
            for section in sections
            for lease in section.leases
            for share in (lease.claims() if section.owner.user == "ann" else ())
        ]
        for card in self.box.limits.keys() - {HOST}:
            size = sum(share.bytes for share in claims if share.device == card)
            if size > self.box.cap:
                self._broken(f"ann has {show_bytes(size)} of {card}, and may not")

    def _claims(self, kernel: Kernel) -> dict[str, int]:
        section = self.box.book().sections.get(kernel.me)
        return section.claims() if section is not None else {}

    def _sums(self) -> None:
        """The totals never fall, and who has its grant waits no more."""
        self._out_of_memory()
        for ticket in self.box.book().tickets:
            lease = self.box.book().lease(ticket.owner, ticket.name)
            if lease is None or lease.key != ticket.key or lease.phase is not Phase.ARRIVING:
                continue
            if not admission.is_part(lease):
                self._broken(f"{ticket.key} waits, and all that it waits for is granted")
            rest = lease.bytes_on(HOST) - sum(share.bytes for share in lease.target)
            if ticket.need_bytes < rest:
                self._broken(f"{ticket.key} does not wait for the {show_bytes(rest)} that it lacks")
        totals = transitions.totals(self.box.book())
        for name, count in self._totals.items():
            if (
                totals[name] < count and not self.box.redis
            ):  # which forgets what no living owner has
                self._broken(f"the total of {name} fell from {count} to {totals[name]}")
        self._totals = totals

    def _out_of_memory(self) -> None:
        """After an error for want of memory, nothing more important leaves."""
        for event in self.box.book().events[-3:]:
            if found := re.search(r"ran out of memory while (\S+) was loaded", event.because):
                rank = self.box.importance
                if event.action in ("offloaded", "unloaded") and rank[event.model] < rank[found[1]]:
                    self._broken(f"{event.model} leaves, and is more important: {event.because}")

    def _departures(self) -> None:
        """Nothing leaves for others that is kept, in use, or more important than what it leaves for."""
        before, book = self._before, self.box.book()
        self._before = book
        if before is book:
            return
        asked: dict[str, int] = {}  # by lease: the importance of what it leaves for; less is more
        for ticket in before.tickets:
            for id in (ticket.name, *ticket.recalls):
                most = ticket.importance if ticket.verb == "use" else -1
                asked[id] = min(asked.get(id, most), most)
        self._storm(before, book)
        for id in book.changed_since(before):
            if id not in book.sections or id not in before.sections:
                continue
            old = {lease.name: lease for lease in before.sections[id].leases}
            for lease in book.sections[id].leases:
                was = old.get(lease.name, lease)
                if lease.phase is not Phase.LEAVING or was.phase is not Phase.SETTLED:
                    continue
                for_others = lease.key.endswith(":obey")
                if for_others and lease.pins:
                    self._broken(f"{lease.id} leaves for others, and is in use")
                if for_others and was.importance < asked.get(lease.id, 0):
                    self._broken(f"{lease.id} leaves for a request of less importance")
                if (was.keep and lease.keep) or self._is_pinned(lease):
                    self._broken(f"{lease.id} leaves for {lease.key}, and is kept")

    def _is_pinned(self, lease: Any) -> bool:
        """Whether a user has pinned it, and no other user has unpinned it since."""
        for kernel in self.box.kernels if lease.id in self.box.kept else ():
            resident = kernel.rt._session.residents.get(lease.name) if kernel.rt else None
            if kernel.owns(lease.id) and resident is not None:
                return resident.spec.keep
        return False

    def _storm(self, before: Any, book: Any) -> None:
        """Requests that wait do not wake one another for ever."""
        if before.sections != book.sections or _wishes(before) != _wishes(book):
            self._in_vain.clear()
            return
        now, often = self.box.machine.now, self._in_vain
        often.append(now)
        if len(often) == MOST_IN_VAIN and now - often[0] < IN_VAIN_SECONDS:
            self._broken(f"{MOST_IN_VAIN} writes in {now - often[0]:.2f} s, which change nothing")

    def _wakes(self) -> None:
        """A request that can be granted is granted soon: no wake-up was lost."""
        box, now = self.box, self.box.machine.now
        keeper, could = box.keeper, self._could
        self._could = {}
        if keeper is None or keeper.process in box.hindered or not keeper.written:
            return
        if now < box.troubled_until:
            return
        book = box.book()
        waits = [
            *self._grantable(book),
            *self._not_obeyed(book),
            *self._remains(book),
            *self._not_begun(book),
            *self._doubled(book),
            *self._overdue(book),
            *self._deadlocked(book),
        ]
        for what in waits:
            since = self._could[what] = could.get(what, now)
            if now - since > (SLOWLY_SECONDS if box.slow else GRANTED_SECONDS):
                self._broken(f"for {now - since:.2f} s {what}")

    def _grantable(self, book: Any) -> Iterator[str]:
        box, now = self.box, self.box.machine.now
        wishes = book.sections, _wishes(book)
        for ticket in book.tickets:
            asked = self._asked.get(ticket.key)
            if ticket.verb != "use" or asked is None:
                continue
            kernel, request, world, rank = asked
            if kernel.closed or kernel.process in box.hindered or kernel.process.killed:
                continue
            if any(one.key == ticket.key for one in book.leases()):
                continue  # it makes room itself
            threads = {key.text: key.thread for key in kernel.rt._session.keys._living()}
            mine = [key for key, thread in threads.items() if thread == threads.get(ticket.key)]
            if any(book.ticket(key) for key in mine if key != ticket.key):
                continue  # after an out-of-memory error it asks another process for room first
            # What only time has brought about rings no bell: who waits looks by itself. So it counts
            # only if it could be granted at the time of its last decision too.
            known = self._first.get(ticket.key, ())
            if len(known) != 3 or known[0] != wishes or known[1] is not asked:
                known = wishes, asked, admit(book, request, world, rank)[1]
                self._first[ticket.key] = known
            today = replace(world, now=now, wall=world.wall + now - world.now)
            told = known[2]
            if box.driver:  # what a driver tells rings no bell
                today = replace(today, samples=box.driver.samples())
                told = admit(book, request, today, rank)[1]
            verdicts = (told, isinstance(told, Grant) and admit(book, request, today, rank)[1])
            if all(isinstance(one, Grant) for one in verdicts):
                yield f"{ticket.key} could be granted, and waits"

    def _not_obeyed(self, book: Any) -> Iterator[str]:
        """What an owner could evict for others, while nothing of it moves."""
        if not book.tickets:
            return
        for kernel in self.box.kernels:
            if kernel.rt is None or kernel.closed or kernel.process in self.box.hindered:
                continue
            if kernel.side is not self.box.sides[0]:  # its facts are of another version
                continue
            session = kernel.rt._session
            if _moves(kernel) or kernel.me not in book.sections:
                continue
            now, wall = session.clock(), session.wall()
            askers = requests.askers(session, book)
            found = []
            # What only time has brought about, such as the end of a grace period, rings no bell.
            mine = [
                one
                for one in book.tickets
                if any(map(kernel.owns, (*one.recalls, *one.shadows, one.name)))
            ]
            rung = max([one.recalled_since or one.arrived for one in mine], default=now)
            for at in (now, rung):
                late = wall + at - now
                samples = box.driver.samples() if (box := self.box).driver else {}
                devices = session.probe.devices
                world = World(at, late, devices, session.limits, samples, session.rules)
                found.append(recall.obey(book, kernel.me, world, "law", askers, session.rank)[1])
            names = {one.lease for one in found[0]} & {one.lease for one in found[1]}
            yield from [f"{kernel.process} could evict {id}, and does not" for id in sorted(names)]

    def _running(self, book: Any) -> dict[str, Kernel]:
        """The kernels that run and are in the book, by owner id."""
        return {
            one.me: one
            for one in self.box.kernels
            if one.rt is not None and not one.closed and one.process not in self.box.hindered
            if one.me in book.sections
        }

    def _remains(self, book: Any) -> Iterator[str]:
        """What nobody works on, and what the dead have left."""
        running = self._running(book)
        can_remove = any(book.sections[id].leases for id in running)
        can_remove &= not self.box.hindered and not any(map(_moves, running.values()))
        for id, section in book.sections.items():
            if self.box.is_dead(id) and can_remove:
                yield f"the book has {id}, which is dead"
            if id not in running:
                continue
            session = running[id].rt._session
            for lease in section.leases:
                begun = lease.phase is Phase.SETTLED or lease.name in session.blocks
                if not begun and lease.key not in session.keys.texts():
                    yield f"{lease.id} is {lease.phase.value} for {lease.key}, which has ended"

    def _not_begun(self, book: Any) -> Iterator[str]:
        """Orders that their owner has not begun."""
        running = self._running(book)
        for ticket in book.tickets:
            owner, _, name = ticket.name.partition("/")
            if ticket.verb in ("use", "evict", "shed") or owner not in running:
                continue
            if _moves(running[owner]) or not running[owner].rt._session.monitor_started:
                continue
            if any(event.answers == ticket.key for event in book.events):
                continue
            orders = running[owner].rt._session.orders
            if ticket.key not in orders:
                yield f"{owner} does not begin {ticket.verb} {name} of {ticket.key}"
            elif orders[ticket.key] is not None and maintenance.POLL_SECONDS == 1.0:
                yield f"the answer of {owner} to {ticket.key} has left the book unread"

    def _overdue(self, book: Any) -> Iterator[str]:
        """Requests that still wait although their time is over."""
        running = self._running(book)
        for ticket in book.tickets:
            is_over = self.box.machine.now > self._ends.get(ticket.key, math.inf)
            if not is_over or ticket.owner not in running or _moves(running[ticket.owner]):
                continue
            section = book.sections[ticket.owner]
            if all(one.phase is not Phase.LEAVING for one in section.leases):  # between two stages
                yield f"{ticket.key} waits, and its time is over"

    def _deadlocked(self, book: Any) -> Iterator[str]:
        """Requests that wait for one another, whoever waits beside them."""
        holding = replace(book, tickets=tuple(one for one in book.tickets if one.held))
        asked = [self._asked[one.key] for one in holding.tickets if one.key in self._asked]
        if len(asked) > 1 and not self.box.hindered:
            if cycle := deadlocked(holding, asked[0][2]):
                yield f"{' and '.join(one.key for one in cycle)} wait for one another"

    def _doubled(self, book: Any) -> Iterator[str]:
        """Where bytes count twice: no process has memory of its own beyond its leases."""
        for id, kernel in self._running(book).items() if self.box.driver else ():
            if book.sections[id].residue:
                yield f"{kernel.process} counts bytes twice"

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
        living = {kernel.me: kernel for kernel in box.kernels if not kernel.closed}
        # An owner without leases has perhaps no monitor, and then it removes the dead at its first request only.
        removes = any(book.sections[id].leases for id in living if id in book.sections)
        self._stay = set() if removes else book.sections.keys() - living.keys()
        tickets = [one.key for one in book.tickets if one.owner not in self._stay]
        found = [f"the request {key} is in the book" for key in tickets]
        found += [f"{one} is drained" for one in book.drained]
        found += [
            f"the book has {id}, which has ended"
            for id in book.sections.keys() - living.keys() - self._stay
        ]
        if box.keeper is not None and box.keeper.core._queue:
            found.append("the keeper has a queue")
        if starting := [kernel.process for kernel in living.values() if kernel.rt is None]:
            return f"{', '.join(map(str, starting))} has not started"
        for kernel in living.values():
            found += [f"{kernel.process}: {what}" for what in self._left_in(kernel)]
        found += self._unequal()
        handles = [
            one.handle
            for kernel in living.values()
            for one in kernel.rt._session.residents.values()
        ]
        return "; ".join([*found, *self._lost_files(handles)])

    def _lost_files(self, handles: list[Any]) -> list[str]:
        """The files on the disk that are of none of these models."""
        if {*Disk.active.files()} - {*map(file_of, handles)}:
            gc.collect()  # as Python does now and then
        files = {*Disk.active.files()} - {*map(file_of, handles)}
        return [f"a file of {one.process} with {show_bytes(one.size)} is left" for one in files]

    def _left_in(self, kernel: Kernel) -> list[str]:
        session = kernel.rt._session
        kept = {
            "keys": session.keys.texts(), "asks": [key.text for key in session.standing], "loads": session.loads,
            "orders": [key for key, answer in session.orders.items() if answer is None],
            "blocks": session.blocks,
        }  # fmt: skip
        found = [f"{name} {list(what)}" for name, what in kept.items() if what]
        for name, resident in session.residents.items():
            if resident.place is Place.MOVING or resident.work.locked() or resident.pins:
                found.append(f"{name} is {resident.place} with {len(resident.pins)} pins")
            if resident.pauses or resident.spec.keep:
                found.append(f"{name} pauses or is kept")
        section = self.box.book().sections.get(kernel.me)
        for lease in section.leases if section is not None else ():
            resident = session.residents.get(lease.name)
            file = file_of(resident.handle) if resident is not None else None
            if (lease.disk_bytes, lease.stowing) != (file.size if file is not None else 0, False):
                found.append(f"the lease {lease.id} has {lease.disk_bytes} on the disk, {file}")
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
                size, claimed = held[kernel.process], self._claims(kernel).get(device, 0)
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
        found += [f"the book has {id}" for id in self.box.book().sections.keys() - self._stay]
        return "; ".join([*found, *self._unequal(), *self._lost_files([])])

    def _keeper(self) -> Any:
        server = self.box.redis or self.box.keeper
        return server and server.process


def _recalled(ticket: Any) -> dict[str, Any]:
    return {id: (Share(HOST, size),) if size else () for id, size in ticket.recalls.items()}


def _without(book: Any, going: dict[str, Any], served: Any) -> Any:
    """The `book` once what leaves already has left, and `going`: by lease, where its bytes go; to nowhere if empty.

    What the tickets `served` have recalled is in `going` too.
    """
    for ticket in served:
        book = book.with_ticket(replace(ticket, recalls={}))
    for lease in [*book.leases()]:
        leaving = lease.phase is Phase.LEAVING
        if leaving or lease.id in going:
            target = lease.target if leaving else going[lease.id]
            if target:
                book = book.with_lease(lease.holding(lease.after(target)))
            else:
                book = book.without_lease(lease.owner, lease.name)
    return book


def _puts(pieces: Any) -> dict[str, int]:
    """The number of the newest write of each owner in these `pieces`."""
    return {id: part.put for id, part in pieces.parts.items()}


def _wishes(book: Any) -> Any:
    """The requests of the `book`, without their times and words."""
    return [replace(one, refreshed=0.0, because="") for one in book.tickets]


def _moves(kernel: Kernel) -> bool:
    """Whether bytes of a model move in this process, perhaps in its monitor, which does nothing else meanwhile."""
    session = kernel.rt._session
    if any(key.endswith((":obey", ":relieve", ":drain")) for key in session.keys.texts()):
        return True  # the monitor is between two moves
    residents = [*session.residents.values()]
    return any(one.work.locked() or one.stowing.locked() for one in residents)
