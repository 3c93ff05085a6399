"""The hands that keep the book, and the one door to them: `open_ledger(url)`.

A ledger keeps one page with a revision. It is *given* what to decide; it does not know what a planner is. Before it
writes it checks that the laws of the book hold, whatever the decision was (`refuse_unlawful`).
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from ..errors import BadSetting, LedgerRefused, LedgerUnavailable
from ..facts import MOST_ENTRIES, MOST_EVENTS, SCHEMA, AllocatorMap, Book, Owner, Ticket, overdrafts
from ..units import show_bytes

T = TypeVar("T")
Decide = Callable[[Book], tuple[Book, T]]


class Ledger(Protocol):
    """One owner's door to the book of its host. Every method may be called from any thread.

    After a fork the child's copy of a door is shut: each method raises LedgerUnavailable there. Open another.
    """

    url: str

    @property
    def owner(self) -> Owner:
        """Whose section and tickets this door may write. Its id never changes; its lock file's inode may, where
        somebody deleted the ledger's directory and this door made it anew: so ask, don't keep."""
        ...

    def read(self) -> Book:
        """The book as it stands. Raises LedgerUnavailable."""
        ...

    def transact(self, decide: Callable[[Book], tuple[Book, T]]) -> T:
        """What `decide` answered for the book that its own answer was then written over.

        `decide` may run more than once; it must be pure, and first look for its own key: in a book that was rebuilt
        meanwhile its effect may be there already. Where it returns the book it was given (the same object), nothing
        is written. After an exception that came from elsewhere than `decide` (KeyboardInterrupt at the
        worst moment) the write may have happened or not: read, and look for your key.
        Raises LedgerUnavailable, LedgerRefused.
        """
        ...

    def dead(self, book: Book) -> frozenset[str]:
        """Ids of the owners of sections and tickets in this book that are proven dead. Unknown is not dead."""
        ...

    def user_of(self, book: Book, owner_id: str, ticket: Ticket | None = None) -> str:
        """The user whose process this owner is, and whose wish the ticket, as far as this ledger can vouch for it;
        empty where it cannot, and then what is asked in that name is not done. See its own docstring for how it
        knows."""
        ...

    def ring(self, owners: Iterable[str]) -> None:
        """Tell these owners to read the book. Never blocks, never fails. One's own id wakes one's own threads."""
        ...

    def wait(self, timeout: float, ends: Iterable[Owner] = ()) -> bool:
        """True as soon as somebody rang or the process of one of the owners in `ends` has ended, False after `timeout`
        seconds. (Of one in another container the end cannot be seen: look for `dead` every second all the same.)

        Several threads may wait: a ring wakes them all, and one that came between a thread's last wait and this
        one counts. A ring may be false; it says "read the book", nothing else.
        """
        ...

    def publish_maps(self, maps: tuple[AllocatorMap, ...]) -> None:
        """Puts this owner's maps beside the book, in the place of its last; they go with it. Raises OSError."""
        ...

    def maps(self) -> dict[str, tuple[AllocatorMap, ...]]:
        """By owner id, the maps that the living put beside the book, as far as they can be seen from here."""
        ...

    def close(self) -> None:
        """Gives up this owner's lock and doorbell. Its section should be gone from the book by then; where it is
        not, others can prove this owner dead and reap it."""
        ...


def open_ledger(url: str, *, notebook: str = "", user: str = "") -> Ledger:
    """A new owner's door to the book that the URL names.

    `memory:` is a book of its own, `memory:NAME` one for all who say that name in this process, and
    `sqlite:///DIRECTORY` one for all processes of this host that name the directory (`…/NAME.db` means `…/NAME`).
    `redis://…`, `rediss://…` and `unix://…` name a Redis, which keeps a page for each host.
    Raises BadSetting for another URL, LedgerUnavailable where the place cannot keep a book.
    """
    scheme, colon, rest = url.partition(":")
    if scheme == "memory":
        from .memory import MemoryLedger

        return MemoryLedger(rest, notebook=notebook, user=user)
    if scheme == "sqlite" and rest.startswith("///"):
        from .sqlite.ledger import SqliteLedger

        return SqliteLedger(_directory(url, rest), notebook=notebook, user=user)
    if scheme in ("redis", "rediss", "unix") and rest.startswith("//"):
        try:
            from .redis.ledger import RedisLedger
        except ModuleNotFoundError as error:
            raise LedgerUnavailable("a ledger in Redis needs the package redis, which is not installed here.\n"
                                    "  Install it:  pip install 'gpu-console[redis]'", path=scheme) from error
        return RedisLedger(url, notebook=notebook, user=user)
    from ..settings import masked

    path = rest.lstrip("/") if scheme == "sqlite" else "" if colon else url
    here = f"; here it would be sqlite://{Path(path).expanduser().absolute()}" if path else ""
    raise BadSetting("GPU_LEDGER", masked(url),
                     f"memory:, memory:NAME, sqlite:///ABSOLUTE/DIRECTORY or redis://HOST:PORT/DB{here}")


def _directory(url: str, rest: str) -> Path:
    """The directory that `sqlite:///…` names; four slashes, as other tools write it, mean the same. Raises BadSetting
    where a relative path was meant."""
    directory = Path("/" + rest.lstrip("/"))
    if directory.suffix == ".db":
        directory = directory.with_suffix("")
    meant = Path(*directory.parts[1:])
    if meant.parts and meant.parts[0] in ("~", ".", ".."):
        raise BadSetting("GPU_LEDGER", url, f"an absolute path, such as sqlite://{os.path.abspath(meant.expanduser())}")
    if len(meant.parts) < 2 and not directory.exists():
        raise BadSetting("GPU_LEDGER", url, f"a directory that is not in the root of the file system; relative to here it is "
                                            f"sqlite://{meant.absolute()}")
    return directory


def default_url(devices_slug: str = "") -> str:
    """Where this user's own book lies when nobody says: under the state directory, or in /var/tmp where that is on
    a network file system (a home directory often is, and locks do not hold there).

    The slug keeps apart books of different worlds, such as simulated and real devices.
    """
    from .sqlite.files import file_system_of, is_network

    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    directory = Path(home) / "gpu-console" / "ledger"
    if is_network(file_system_of(directory)):
        directory = Path(f"/var/tmp/gpu-console-{os.geteuid()}/ledger")
    return f"sqlite://{directory / devices_slug}"


def refuse_unlawful(old: Book, new: Book, writer: str, dead: Callable[[Book], frozenset[str]], path: str = "") -> None:
    """Nothing, where this owner may write `new` over `old`; else raises LedgerRefused.

    `dead` proves deaths; it is only asked when somebody else's section or ticket was removed.
    """
    why = (
        _sections_refusal(old, new, writer, dead)
        or _tickets_refusal(old, new, writer, dead)
        or _shared_refusal(old, new, writer)
        or _events_refusal(old, new)
        or _size_refusal(old, new)
        or _overdraft_refusal(old, new)
    )
    if why:
        raise LedgerRefused(f"the ledger {path or 'in memory'} refused a write by {writer}: {why}.\n"
                            f"  The book is as it was. This is a fault of gpu-console: please report it.",
                            path=path, why=why, writer=writer)


def _sections_refusal(old: Book, new: Book, writer: str, dead: Callable[[Book], frozenset[str]]) -> str:
    if new.sections is old.sections:
        return ""
    changed = [(id, section) for id, section in new.sections.items() if old.sections.get(id) is not section]
    for id, section in changed:
        if id != writer and section == old.sections.get(id):
            continue
        if id != writer:
            return f"the section of {id} is its owner's to write"
        if section.owner.id != writer:
            return f"the section under {writer} says it is {section.owner.id}'s"
        for lease in section.leases:
            if lease.owner != writer:
                return f"{lease.id} lies in a section that is not its owner's"
        if len({lease.name for lease in section.leases}) < len(section.leases):
            return "two leases have one name: an identity is (owner, name)"
    removed = old.sections.keys() - new.sections.keys() - {writer}
    unproven = removed - dead(old) if removed else removed
    if unproven:
        return f"the section of {', '.join(sorted(unproven))} may go only with proof of death"
    return ""


def _tickets_refusal(old: Book, new: Book, writer: str, dead: Callable[[Book], frozenset[str]]) -> str:
    if new.tickets is old.tickets and new.sections.keys() == old.sections.keys():
        return ""
    before = {ticket.key: ticket for ticket in old.tickets if ticket.owner != writer}
    after = {ticket.key: ticket for ticket in new.tickets if ticket.owner != writer}
    for key, ticket in after.items():
        if ticket is not before.get(key) and ticket != before.get(key):
            return f"the ticket {key} is {ticket.owner}'s to write"
        if ticket.owner in old.sections and ticket.owner not in new.sections:
            return f"the ticket {key} outlives {ticket.owner}: who is reaped goes whole"
    losers = {before[key].owner for key in before.keys() - after.keys()}
    for loser in sorted(losers):
        if loser in new.sections:
            return f"the tickets of {loser} are its own to withdraw"
    unproven = losers - dead(old) if losers else losers
    if unproven:
        return f"the tickets of {', '.join(sorted(unproven))} may go only with proof of death"
    return ""


def _shared_refusal(old: Book, new: Book, writer: str) -> str:
    """Devices and limits are the first owner's word; a sample gives way to a newer one."""
    if new.schema != SCHEMA:
        return f"schema {new.schema} was to be written where {SCHEMA} is in force"
    alone = not (old.sections.keys() - {writer})
    if new.devices is not old.devices and not alone:
        after = {device.id: device for device in new.devices}
        for device in old.devices:
            if after.get(device.id) != device:
                return f"{device.id} was described by the first owner; others may only add devices"
    if new.limits is not old.limits and not alone:
        for device, limit in old.limits.items():
            if new.limits.get(device) != limit:
                return (f"the limit of {device} is {show_bytes(limit)} since the first owner; "
                        f"{show_bytes(new.limits.get(device, 0))} has to wait until nobody else is there")
    if new.samples is not old.samples:
        for device, sample in old.samples.items():
            newer = new.samples.get(device)
            if newer is sample or newer == sample or (newer is None and alone):
                continue
            if newer is None or newer.taken_at <= sample.taken_at:
                return f"the sample of {device} would be replaced by one that is no newer"
    return ""


def _events_refusal(old: Book, new: Book) -> str:
    if new.events is old.events:
        return "" if new.seq >= old.seq else f"seq would fall from {old.seq} to {new.seq}"
    kept = tuple(event for event in new.events if event.seq <= old.seq)
    added = tuple(event.seq for event in new.events[len(kept):])
    if kept != old.events[len(old.events) - len(kept):]:
        return "events are appended and trimmed, never changed"
    if any(later <= earlier for earlier, later in itertools.pairwise((old.seq, *added, new.seq + 1))):
        return f"the numbers of new events must rise from {old.seq} to {new.seq}"
    return ""


def _size_refusal(old: Book, new: Book) -> str:
    after = new.entries
    if after > MOST_ENTRIES and after > old.entries:
        return f"{after} leases and tickets are more than the {MOST_ENTRIES} that a page holds"
    if len(new.events) > MOST_EVENTS:
        return f"{len(new.events)} events are more than the {MOST_EVENTS} that a page holds"
    return ""


def _overdraft_refusal(old: Book, new: Book) -> str:
    if new.sections is old.sections and new.limits is old.limits:
        return ""
    return "; ".join(
        f"{device} would be claimed {show_bytes(excess)} beyond its limit of {show_bytes(new.limits[device])} (law 1)"
        for device, excess in overdrafts(old, new).items()
    )
