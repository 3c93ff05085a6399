"""Deliberate faults in the scheduler, the ledgers and the owner, each in one line of code.

The tests must notice every fault.

    python -m tests.mutants            all of them, on all cores
    python -m tests.mutants grace      those whose name contains "grace"

This module is not part of the ordinary run. It applies each fault to a copy of the package in a
temporary directory, and runs the fault's tests against that copy with `-x -q`. The result is
*caught* or *survived*. A fault that survived shows a rule of the code that no test checks. A fault
whose line is no longer in the code is *stale* and must be renewed. The exit status is the number of
survived and stale faults.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCHEDULER = [
    f"tests/scheduler/test_{name}.py"
    for name in (
        "admission",
        "eviction_cards",
        "eviction_policy",
        "placement",
        "pressure",
        "recall",
        "transitions",
        "deadlock",
        "laws",
        "audited_processes",
    )
]
PARTS = ["tests/scheduler/test_parts.py"]
SPLITTING = ["tests/scheduler/test_splitting.py"]
HOPELESS = ["tests/scheduler/test_hopeless.py"]
WARM_POOL = ["tests/scheduler/test_warm_pool.py"]
EARLIER_USES = ["tests/stories/test_earlier_uses.py"]
DUPLEX = ["tests/scheduler/test_duplex.py", "tests/owner/test_duplex.py"]
QUARANTINE = ["tests/ledgers/test_quarantine.py", "tests/ledgers/test_pages.py"]
QUEUE = ["tests/ledgers/test_writer_queue.py"]
LEDGER = ["tests/ledgers/test_contract.py", "tests/ledgers/test_sqlite.py"]
CATALOGUE = [
    "tests/catalog/test_documents.py",
    "tests/catalog/test_manifests.py",
    "tests/owner/test_catalog.py",
]
ARGUMENTS = ["tests/owner/test_arguments.py", "tests/owner/test_notebook_path.py"]
OWNER = ["tests/owner/test_runtime.py", "tests/owner/test_real_models.py"]

WHO = ["tests/backends/test_search.py", "tests/backends/test_holders.py"]
PARKING = ["tests/backends/test_kernel_memory.py"]
SHADOWS = ["tests/backends/test_shadows.py", "tests/owner/test_shadows.py"]
SHARED = ["tests/backends/test_shared_copies.py", "tests/scheduler/test_shared_copies.py"]
PROGRAMS = ["tests/backends/test_parked_programs.py"]  # random programs must find these alone

# Without a cache and without plugins that these tests do not use.
PYTEST = "-x -q --no-header --tb=no -p no:cacheprovider -p no:nbval -p no:schemathesis".split()


class Fault(NamedTuple):
    """A line of a module, a faulty replacement, and the tests that must notice it."""

    name: str
    module: str
    line: str  # as it is in the code, once
    wrong: str  # its replacement
    tests: list[str] = SCHEDULER


FAULTS = [
    Fault(
        "programs: a park does not wait for the cards",
        "backends/pytorch/kernel_memory",
        "if why := streams.not_at_rest(cards, REST_SECONDS):",
        "if why := streams.not_at_rest((), REST_SECONDS):",
        PROGRAMS,
    ),
    Fault(
        "programs: the last storage is not copied back",
        "backends/pytorch/kernel_memory",
        "torch._foreach_copy_(fresh, sources, non_blocking=True)",
        "torch._foreach_copy_(fresh[:-1], sources[:-1], non_blocking=True)",
        PROGRAMS,
    ),
    Fault(
        "programs: a returned block is recorded on no other stream",
        "backends/pytorch/kernel_memory",
        "streams.record(blocks, device, stream, model.streams.get(device, ()))",
        "streams.record(blocks, device, stream, ())",
        PROGRAMS,
    ),
    Fault(
        "a return does not wait for work on the fresh blocks",
        "backends/pytorch/kernel_memory",
        "_rest(cards)  # a fresh block may have been freed while work on it was pending",
        "pass",
        PARKING,
    ),
    Fault(
        "a park does not wait for the cards",
        "backends/pytorch/kernel_memory",
        "if why := streams.not_at_rest(cards, REST_SECONDS):",
        "if why := streams.not_at_rest((), REST_SECONDS):",
        PARKING,
    ),
    Fault(
        "bytes return to blocks of the current stream",
        "backends/pytorch/kernel_memory",
        "with streams.on_stream(device, stream):",
        "with streams.on_stream(device, None):",
        PARKING,
    ),
    Fault(
        "a returned block is recorded on no other stream",
        "backends/pytorch/kernel_memory",
        "streams.record(blocks, device, stream, model.streams.get(device, ()))",
        "streams.record(blocks, device, stream, ())",
        PARKING,
    ),
    Fault(
        "streams that Python knows are forgotten",
        "backends/pytorch/kernel_memory",
        "found[stream.device].add(streams.pointer(stream))",
        "pass",
        PARKING,
    ),
    Fault(
        "memory in a private pool is parked",
        "backends/pytorch/kernel_memory",
        "if streams.private(addresses, segments):",
        "if False:",
        PARKING,
    ),
    Fault(
        "only the first card's tensors are parked",
        "backends/pytorch/kernel_memory",
        "own = cards[:1] if cards[0].counted else cards",
        "own = cards[:1]",
        PARKING,
    ),
    Fault(
        "after a park the card's cache is kept",
        "backends/pytorch/kernel_memory",
        "streams.release_cached(card)",
        "pass",
        PARKING,
    ),
    Fault(
        "a failed return keeps its new blocks",
        "backends/pytorch/kernel_memory",
        "st.let_go(error)",
        "pass",
        PARKING,
    ),
    Fault(
        "a wait for a card has no limit",
        "backends/pytorch/streams",
        "if not waiting.wait(seconds):",
        "if not waiting.wait():",
        PARKING,
    ),
    Fault(
        "a stuck card gets another waiting thread each time",
        "backends/pytorch/streams",
        "if earlier is not None and not earlier.wait(seconds):",
        "if False:",
        PARKING,
    ),
    Fault(
        "the copy is not waited for before the exchange",
        "backends/pytorch/storages",
        "_copy_all(sources, targets, memories, host, progress)\n        wait()",
        "_copy_all(sources, targets, memories, host, progress)",
        PARKING,
    ),
    Fault(
        "overlook gradients that nobody has read",
        "backends/pytorch/search",
        "hidden += gradient(tensor)",
        "pass",
        WHO,
    ),
    Fault(
        "ignore references of C++ code",
        "backends/pytorch/holders",
        "others = uses - 1",
        "others = 0",
        WHO,
    ),
    Fault(
        "free what others refer to",
        "backends/pytorch/holders",
        "for key, count in references.items() if count > 0]",
        "for key, count in references.items() if count > 9]",
        WHO,
    ),
    Fault(
        "take any value as a truth value",
        "arguments",
        "    _require(value is True or value is False)\n",
        "",
        ARGUMENTS,
    ),
    Fault(
        "store half a character",
        "arguments",
        "len(text) <= LONGEST_NAME and text.isprintable())",
        "len(text) <= LONGEST_NAME)",
        ARGUMENTS,
    ),
    Fault(
        "let a value's own error out",
        "arguments",
        "    except Exception:\n        raise BadSetting(name, value, rule.expected) from None\n",
        "    except ValueError:\n        raise BadSetting(name, value, rule.expected) from None\n",
        ARGUMENTS,
    ),
    Fault(
        "swallow an unknown option",
        "options",
        '            raise unknown_option(name, value, (*known, *others), f"the backend {backend}")\n',
        "            continue\n",
        ARGUMENTS,
    ),
    Fault(
        "record a path as it is given",
        "ledgers/liveness",
        "        notebook=printable(notebook, LONGEST_PATH),\n",
        "        notebook=notebook,\n",
        ARGUMENTS,
    ),
    Fault(
        "keep an interrupted block",
        "owner/block_table",
        "            elif self.pop(name, None):",
        "            elif False:",
        OWNER,
    ),
    Fault(
        "free leaving bytes early",
        "facts/leases",
        "            for share in lease.shares:\n                claimed[",
        "            for share in () if lease.target else lease.shares:\n                claimed[",
    ),
    Fault(
        "count a move on one device only",
        "facts/leases",
        "            for share in lease.target:\n                claimed[",
        "            for share in () if lease.shares else lease.target:\n                claimed[",
    ),
    Fault(
        "forget residue",
        "facts/leases",
        "        claimed = dict(self.residue)\n",
        "        claimed: dict[str, int] = {}\n",
    ),
    Fault(
        "forget unseen bytes", "scheduler/capacity", "lease.settled_at >= taken_at[device]", "False"
    ),
    Fault(
        "forget what is arriving unseen",
        "scheduler/capacity",
        "        if device in taken_at:\n",
        "        if False:\n",
    ),
    Fault(
        "unknown is zero used",
        "scheduler/capacity",
        "            blind[id] = reason\n",
        "            blind |= {} if sample and sample.free_bytes is None else {id: reason}\n",
    ),
    Fault(
        "believe a stale sample",
        "scheduler/capacity",
        "    if age > world.rules.stale_seconds:\n",
        "    if False:\n",
    ),
    Fault(
        "believe our own larger limit",
        "scheduler/capacity",
        "    return min(own_limit, book.limits.get(device, own_limit))\n",
        "    return own_limit\n",
    ),
    Fault(
        "evict for bytes that have just left",
        "scheduler/context",
        "    for device, size in freed.items():\n        room[",
        "    for device, size in ():\n        room[",
    ),
    Fault("move a model in use", "scheduler/evictable", "    if lease.pins:\n", "    if False:\n"),
    Fault(
        "evict the kept", "scheduler/evictable", '    if lease.keep:\n        return "kept"\n', ""
    ),
    Fault(
        "skip importance",
        "scheduler/evictable",
        "    if lease.importance < importance:\n",
        "    if False:\n",
    ),
    Fault("ignore grace", "scheduler/evictable", "used + world.rules.grace_seconds", "used"),
    Fault(
        "drop what exists nowhere else",
        "scheduler/evictable",
        "    if lease.droppable and (drop or not moves):\n",
        "    if drop or not moves:\n",
    ),
    Fault(
        "drop before the warm pool is full", "scheduler/evictable", "(drop or not moves)", "True"
    ),
    Fault(
        "spend host bytes twice",
        "scheduler/eviction_verdict",
        "            self.host_room -= copied_bytes(lease, step)\n",
        "            pass\n",
    ),
    Fault(
        "a needless piece leaves",
        "scheduler/victims",
        "    size = max(1, -(-need // piece)) * piece\n",
        "    size = max(1, -(-need // piece) + 1) * piece\n",
        PARTS,
    ),
    Fault(
        "a part without room in host memory",
        "scheduler/victims",
        "                if size <= (free if lease.droppable else most + reserved):\n",
        "                if True:\n",
        PARTS,
    ),
    Fault(
        "bytes on the card are reserved twice",
        "scheduler/context",
        "(Share(share.device, max(0, share.bytes - self.held[share.device])),)",
        "(share,)",
        PARTS,
    ),
    Fault(
        "a part counts as the whole",
        "facts/leases",
        "        if staying <= 0 or not self.piece_bytes or len(on_cards) > 1:\n",
        "        if True:\n",
        PARTS,
    ),
    Fault(
        "a lease in parts is used",
        "scheduler/admission",
        '(lease.all_on_device or lease.kind == "block")',
        '(lease.on_device or lease.kind == "block")',
        PARTS,
    ),
    Fault(
        "a younger request takes what waits to be whole",
        "scheduler/eviction",
        "        if returning and (lease.owner, lease.name) in returning:\n",
        "        if False:\n",
        PARTS,
    ),
    Fault(
        "forget that the host takes in only so many",
        "scheduler/feasibility",
        "        if size > left - remain_bytes:\n",
        "        if False:\n",
    ),
    Fault("held ignored", "scheduler/evictable", "    if lease.id in held:\n", "    if False:\n"),
    Fault(
        "victims not pruned",
        "scheduler/victims",
        "enumerate(chosen) if index not in spared])",
        "enumerate(chosen)])",
    ),
    Fault(
        "the most important leave first",
        "scheduler/victims",
        "(-lease.importance, lease.wished",
        "(lease.importance, lease.wished",
    ),
    Fault(
        "the wishes do not order the victims",
        "scheduler/victims",
        "-lease.importance, lease.wished, rank",
        "-lease.importance, 0, rank",
    ),
    Fault(
        "a wish evicts a wished model",
        "scheduler/evictable",
        "    if 0 < world.rules.spared <= lease.wished:\n",
        "    if False:\n",
    ),
    Fault(
        "some victims are better than none",
        "scheduler/victims",
        "            return chosen\n    return None\n",
        "            return chosen\n    return chosen\n",
    ),
    Fault(
        "importance forgotten across cards",
        "scheduler/eviction",
        "return worth(leaving[-1], world, rank) if",
        "return (0, *worth(leaving[-1], world, rank)[1:]) if",
    ),
    Fault(
        "worth forgotten across cards",
        "scheduler/eviction",
        "highest_rank,\n            rounded_seconds,\n            cards,\n            leases,",
        "rounded_seconds,\n            cards,\n            leases,\n            highest_rank,",
    ),
    Fault(
        "ageing displaces",
        "scheduler/eviction",
        "    asker, importance = request.lease.owner, request.lease.importance\n    recalled",
        "    asker = request.lease.owner\n"
        "    importance = request.lease.importance - int(world.now - request.arrived) // 30\n"
        "    recalled",
    ),
    Fault("no ageing", "scheduler/queue", "    if steps <= 0:\n", "    if True:\n"),
    Fault(
        "elders' needs forgotten",
        "scheduler/context",
        "    for ticket in blocking:\n",
        "    for ticket in ():\n",
    ),
    Fault(
        "elders' victims asked twice",
        "scheduler/context",
        "        recalled = frozenset(id for ticket in blocking for id in ticket.recalls)\n",
        "        recalled = frozenset()\n",
    ),
    Fault(
        "pass a blocked elder for ever",
        "scheduler/queue",
        "    if blocked_since and world.now - blocked_since < world.rules.passing_seconds:\n",
        "    if blocked_since:\n",
    ),
    Fault(
        "the holder waits behind its waiter",
        "scheduler/queue",
        "        if lease and any(share.device in needed_devices for share in lease.shares):\n"
        "            return True\n",
        "        if False:\n            return True\n",
    ),
    Fault(
        "wait for stopped processes",
        "scheduler/queue",
        "world.now - ticket.refreshed <= world.rules.refresh_seconds",
        "True",
    ),
    Fault(
        "lose the ticket's place",
        "scheduler/admission",
        "arrived=request.arrived,\n",
        "arrived=world.now,\n",
    ),
    Fault(
        "a grant keeps its ticket",
        "scheduler/admission",
        "    book = book.without_ticket(request.key).with_lease(lease)\n",
        "    book = book.with_lease(lease)\n",
    ),
    Fault(
        "a lease is born unpinned",
        "scheduler/admission",
        "        pins=1,\n",
        "        pins=0,\n",
    ),
    Fault(
        "an unheard grant is forgotten",
        "scheduler/admission",
        "    if lease and lease.key == request.key and lease.phase is Phase.ARRIVING:\n",
        "    if False:\n",
    ),
    Fault(
        "unheard steps are forgotten",
        "scheduler/admission",
        "    decided = unfinished_steps(book, request.lease.owner, request.key)\n",
        "    decided = ()\n",
    ),
    Fault(
        "a full page evicts",
        "scheduler/admission",
        "    if full_for_waiting(book, request) or context.twin:\n",
        "    if context.twin:\n",
    ),
    Fault(
        "room is made twice for one model",
        "scheduler/admission",
        "    if full_for_waiting(book, request) or context.twin:\n",
        "    if full_for_waiting(book, request):\n",
    ),
    Fault(
        "two leases leave for one entry",
        "scheduler/page_entries",
        "    if leaving is not None:\n",
        "    if False:\n",
    ),
    Fault(
        "weights that exist nowhere else leave for an entry",
        "scheduler/page_entries",
        "        if not lease.droppable or lease.id in context.recalled:\n",
        "        if lease.id in context.recalled:\n",
    ),
    Fault(
        "wait on a card that is too small",
        "scheduler/admission",
        "    possible = without_hopeless(candidates, never)\n",
        "    possible = candidates\n",
    ),
    Fault(
        "deadlock: one card for each need",
        "scheduler/deadlock",
        "    return [card for card in limits if not ticket.places or card in ticket.places]\n",
        "    return [share.device for share in ticket.need]\n",
    ),
    Fault(
        "deadlock: what is held is free",
        "scheduler/deadlock",
        "        if lease.keep or lease.id in held:\n",
        "        if lease.keep:\n",
    ),
    Fault(
        "deadlock: bystanders are refused",
        "scheduler/deadlock",
        "        if len(blocking) == len(stuck):\n            return tuple(stuck)\n",
        "        return tuple(stuck)\n",
    ),
    Fault(
        "relief overrides keep_alive",
        "scheduler/relief",
        " or idle < lease.keep_alive",
        "",
    ),
    Fault(
        "relief takes more than it must",
        "scheduler/relief",
        "                freed += sum(share.bytes for share in step.source if share.device == view.device.id)\n",
        "",
    ),
    Fault(
        "relief by the clock, whoever it helps",
        "scheduler/relief",
        'rules.relief == "auto" and not _helps(book, view)',
        "False",
    ),
    Fault(
        "a recall obeyed twice",
        "scheduler/recall",
        "not person and lease.away_since >= ticket.refreshed",
        "False",
        [*SCHEDULER, *PARTS],
    ),
    Fault(
        "an ask swallowed", "scheduler/recall", "            orders.append(", "            repr("
    ),
    Fault(
        "a recall overrides importance",
        "scheduler/recall",
        "importance=PERSON if person else",
        "importance=PERSON if True else",
    ),
    Fault(
        "a failed load keeps its room",
        "scheduler/transitions",
        "    if not lease.shares:\n        book = book.without_lease(owner, name)\n",
        "    if not lease.shares:\n        pass\n",
    ),
    Fault(
        "abandon whatever is under way",
        "scheduler/transitions",
        "if lease is None or lease.key != key or",
        "if lease is None or",
    ),
    Fault(
        "believe what the owner does not know",
        "scheduler/transitions",
        "if lease.phase is not Phase.SETTLED and lease.key in truth.keys:",
        "if lease.phase is not Phase.SETTLED:",
    ),
    Fault(
        "forget what is under way",
        "scheduler/transitions",
        "    leases += under_way.values()\n",
        "",
    ),
    Fault(
        "keep stale tickets",
        "scheduler/transitions",
        "    for key in stale:\n",
        "    for key in ():\n",
    ),
    Fault(
        "count a departure twice",
        "scheduler/transitions",
        "lease.phase is Phase.SETTLED and lease.shares == shares:",
        "False:",
    ),
    Fault(
        "reap leaves tickets behind",
        "scheduler/transitions",
        "sections=sections, tickets=tickets, counts=counts)",
        "sections=sections, counts=counts)",
    ),
    Fault(
        "totals fall with their owners",
        "scheduler/transitions",
        "        counts[action] = counts.get(action, 0) + times\n",
        "        pass\n",
    ),
    Fault(
        "later owners raise the limit",
        "scheduler/transitions",
        "{**world.limits, **book.limits}",
        "{**book.limits, **world.limits}",
    ),
    Fault(
        "ignore the revision",
        "ledgers/sqlite/page",
        'WHERE host=? AND rev=?"\n',
        'WHERE host=? AND (rev=? OR 1)"\n',
        LEDGER,
    ),
    Fault(
        "no roster before the commit",
        "ledgers/sqlite/page",
        "            self._write_roster(draft.book, draft.packed, page.rev + 1)\n",
        "",
        LEDGER,
    ),
    Fault(
        "answer from an older page",
        "ledgers/common",
        "                    if new is page.book and known and self._store.look() is not known:\n",
        "                    if False:\n",
        LEDGER,
    ),
    Fault(
        "a process whose patience ends passes the process that was woken",
        "ledgers/sqlite/writer_queue",
        "                may_try = not self._will_continue() if is_next else ended == ended_before\n",
        "                may_try = True\n",
        QUEUE,
    ),
    Fault(
        "a woken process takes the turn between a lease and its release",
        "ledgers/sqlite/writer_queue",
        "        mark = CONTINUES if continues else ALL_MAY\n",
        "        mark = ALL_MAY\n",
        QUEUE,
    ),
    Fault(
        "an unreadable section claims nothing",
        "facts/book",
        "            for device, size in unread.held.items():\n",
        "            for device, size in ():\n",
        QUARANTINE,
    ),
    Fault(
        "write what others cannot read",
        "ledgers/page_parts",
        "        decode(content)\n",
        "        pass\n",
        QUARANTINE,
    ),
    Fault(
        "an unreadable section may be removed by anybody",
        "ledgers/invariants",
        "    removed |= old.quarantined.keys() - new.quarantined.keys()\n",
        "",
        QUARANTINE,
    ),
    Fault(
        "a grant in a book that was replaced",
        "ledgers/sqlite/page",
        "        if not written or not self._in_force(page):",
        "        if not written:",
        LEDGER,
    ),
    Fault(
        "grant although owners may be missing",
        "ledgers/sqlite/page",
        "        if closed > 0 and self._grants(page, draft):",
        "        if False:",
        LEDGER,
    ),
    Fault(
        "forget owners without files",
        "ledgers/sqlite/recovery",
        "        if known is not Life.DEAD:",
        "        if False:",
        LEDGER,
    ),
    Fault(
        "write another owner's section",
        "ledgers/invariants",
        '        if id != write.writer:\n            return f"the section of',
        '        if False:\n            return f"the section of',
        LEDGER,
    ),
    Fault(
        "reap the living",
        "ledgers/liveness",
        "Life.ALIVE if _held_elsewhere(fd) else Life.DEAD",
        "Life.DEAD",
        LEDGER,
    ),
    Fault(
        "a missing lock file is a death",
        "ledgers/liveness",
        "        return Life.UNKNOWN\n    try:",
        "        return Life.DEAD\n    try:",
        LEDGER,
    ),
    Fault(
        "the ledger lets a device be overdrawn",
        "ledgers/invariants",
        "    _no_overdraft,\n",
        "",
        LEDGER,
    ),
    Fault(
        "take another's ticket",
        "ledgers/invariants",
        "        if loser in new.sections:",
        "        if False:",
        LEDGER,
    ),
    Fault(
        "believe a stale pin",
        "owner/training",
        "        return len(self.pins - self._graph_pins)",
        "        return 0",
        OWNER,
    ),
    Fault(
        "lose a ticket on time-out",
        "owner/session",
        "            if self.ledger.read().ticket(key.text):",
        "            if False:",
        OWNER,
    ),
    Fault(
        "drop without proof",
        "owner/resident",
        "                if not self.backend.unchanged(self.handle):",
        "                if False:",
        OWNER,
    ),
    Fault(
        "a block keeps its lease",
        "owner/blocks",
        "lease, _ = session.blocks.pop(name, (None, None))",
        "lease, _ = session.blocks.get(name, (None, None))",
        OWNER,
    ),
    Fault(
        "duplex: a part takes bytes that have not left yet",
        "scheduler/duplex",
        "    free = context.free()[card] - context.held.get(card, 0)\n",
        "    free = context.room_later[card]\n",
        DUPLEX,
    ),
    Fault(
        "duplex: nobody waits for the rest of the room",
        "scheduler/duplex",
        "    return (Share(share.device, share.bytes - part),)\n",
        "    return (Share(share.device, 0),)\n",
        DUPLEX,
    ),
    Fault(
        "duplex: a stage frees more than has left",
        "scheduler/duplex",
        "    rest = lease.leaving_bytes - moved\n",
        "    rest = lease.leaving_bytes - in_host\n",
        DUPLEX,
    ),
    Fault(
        "duplex: a model leaves at once",
        "scheduler/duplex",
        "    return stage if size >= 2 * stage else 0\n",
        "    return 0\n",
        DUPLEX,
    ),
    Fault(
        "duplex: the own departures are waited for",
        "owner/acquire",
        "            departures.start(step, wait=not (returns and returns.piece_bytes))\n",
        "            departures.start(step, wait=True)\n",
        DUPLEX,
    ),
    Fault(
        "duplex: a part in use that cannot be used",
        "owner/granted",
        "        resident.settle_at(settled)\n        _settle(session, resident, step.because)\n",
        "        resident.settle_at(replace(settled, pins=1, keep=True))\n"
        "        _settle(session, resident, step.because)\n",
        DUPLEX,
    ),
    Fault(
        "a failed load keeps its bytes",
        "owner/granted",
        "                resident.backend.drop(handle)\n",
        "                pass\n",
        OWNER,
    ),
    Fault(
        "catalogue: trust whatever a file says",
        "catalog/entries",
        "if settings.gpu_trust_remote_code or not is_trust(flag):",
        "if True:",
        CATALOGUE,
    ),
    Fault(
        "catalogue: code runs on a file's word",
        "catalog/entries",
        "    if settings.gpu_trust_remote_code and _requests_trust(fields):",
        "    if _requests_trust(fields):",
        CATALOGUE,
    ),
    Fault(
        "catalogue: others leave for what cannot be loaded",
        "owner/acquire",
        "    require_loadable(spec)\n",
        "",
        CATALOGUE,
    ),
    Fault(
        "catalogue: two writers, no lock",
        "catalog/store",
        "            return FileLock(",
        "            return open(os.devnull) or FileLock(",
        CATALOGUE,
    ),
    Fault(
        "catalogue: replaced in place",
        "catalog/store",
        "                os.replace(draft, self.file)\n",
        "                self.file.write_bytes(b'{}')\n                os.replace(draft, self.file)\n",
        CATALOGUE,
    ),
    Fault(
        "catalogue: a hand-written file is overwritten",
        "catalog/store",
        "            self._require_ours(new, known)\n",
        "",
        CATALOGUE,
    ),
    Fault(
        "catalogue: a loaded model changes under its users",
        "owner/registry",
        "    if resident is not None and resident.catalogued and resident.place is Place.GONE:",
        "    if resident is not None and resident.catalogued:",
        CATALOGUE,
    ),
    Fault(
        "catalogue: a field that stands twice",
        "catalog/documents",
        "            if key.value in seen:",
        "            if False:",
        CATALOGUE,
    ),
    Fault(
        "catalogue: a slip of the pen is kept",
        "catalog/schema",
        "        if close and not",
        "        if False and not",
        CATALOGUE,
    ),
    Fault(
        "shadows: a changed storage leaves without a copy",
        "backends/pytorch/shadows",
        "return torch.equal(digest(group.bytes), known)",
        "return True",
        SHADOWS,
    ),
    Fault(
        "shadows: they displace what the host holds",
        "scheduler/shadows",
        "if room(book, world).get(HOST, 0) < extra:",
        "if False:",
        SHADOWS,
    ),
    Fault(
        "shadows: pages on the host count once for each lease",
        "facts/book",
        "            claimed[HOST] -= twice",
        "            pass",
        SHARED,
    ),
    Fault(
        "shadows: a grant does not see that pages are shared",
        "facts/book",
        "            claimed[HOST] -= twice",
        "            pass",
        SHARED,
    ),
    Fault(
        "shadows: pages of a changed storage are not counted",
        "facts/leases",
        "unused = max(0, lease.copy_bytes - lease.copied_bytes)",
        "unused = 0",
        SHARED,
    ),
    Fault(
        "shadows: torn pages are used",
        "backends/pytorch/shared_copies",
        "if stored is None or stored.digest != sums.numpy().tobytes():",
        "if stored is None:",
        SHARED,
    ),
    Fault(
        "shadows: pages that were written are not compared",
        "devices/shared_pages",
        "return os.fstat(self.file).st_mtime_ns == 0",
        "return True",
        SHARED,
    ),
    Fault(
        "shadows: what a process built itself is not compared",
        "backends/pytorch/shared_copies",
        "if source.data_ptr() != target.data_ptr() and not torch.equal(source, target):",
        "if False:",
        SHARED,
    ),
    Fault(
        "shadows: pages with other files are used",
        "backends/pytorch/shared_copies",
        "if first.magic != MAGIC or first.content != content:",
        "if first.magic != MAGIC:",
        SHARED,
    ),
    Fault(
        "shadows: pages that others may open are used",
        "devices/shared_pages",
        "if not ours or found.st_mode & 0o077 or found.st_nlink:",
        "if not ours or found.st_nlink:",
        SHARED,
    ),
    Fault(
        "shadows: what a notebook writes reaches the others",
        "devices/shared_pages",
        "kind = mmap.MAP_SHARED if memory.pinned else mmap.MAP_PRIVATE",
        "kind = mmap.MAP_SHARED",
        SHARED,
    ),
    Fault(
        "shadows: processes of another user are searched",
        "owner/shadows",
        "        if near != (me.host, me.boot, me.user, me.namespaces):",
        "        if False:",
        SHADOWS,
    ),
    Fault(
        "parts: a card may be left without a piece",
        "scheduler/parts",
        "place = bisect_right(later, start)",
        "place = bisect_right(later, start - 1)",
        SPLITTING,
    ),
    Fault(
        "parts: a cut leaves too many bytes for the next card",
        "scheduler/parts",
        "if place < len(later) and sums[later[place] - 1] - sums[start - 1] <= free[index]:",
        "if place < len(later):",
        SPLITTING,
    ),
    Fault(
        "precious: at most 16 sets are tried",
        "scheduler/stuck",
        "MOST_TRIED = 256",
        "MOST_TRIED = 16",
        HOPELESS,
    ),
    Fault(
        "precious: the smallest sums are kept",
        "scheduler/evictable",
        "for size in nlargest(MOST_SUMS, sets)}",
        "for size in sorted(sets)[:MOST_SUMS]}",
        HOPELESS,
    ),
    Fault(
        "recall: a lease in parts is offloaded for host memory",
        "scheduler/recall",
        "return bool(cards) and not any(lease.bytes_on(card) for card in cards)",
        "return False",
        WARM_POOL,
    ),
    Fault(
        "uses: a released model leaves no event",
        "owner/earlier_uses",
        "if lease.source and lease.recent_uses:",
        "if False:",
        EARLIER_USES,
    ),
    Fault(
        "uses: the uses of killed processes are not read",
        "owner/earlier_uses",
        "if resident.content == event.source:",
        "if False:",
        EARLIER_USES,
    ),
    Fault(
        "uses: only the newest event is read",
        "owner/earlier_uses",
        "tail(MOST_USES, None,",
        "tail(1, None,",
        ["tests/owner/test_recent_uses.py"],
    ),
]


def trial(fault: Fault) -> str:
    """The result for one fault: caught (and by which test), survived, or stale."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        # With their compiled modules: the copies have the times of the originals, so these are used.
        for part in ("gpu_runtime", "kernel_ext", "tests"):
            shutil.copytree(ROOT / part, Path(place) / part)
        shutil.copy(ROOT / "pyproject.toml", place)
        source = Path(place) / "gpu_runtime" / f"{fault.module}.py"
        text = source.read_text()
        if text.count(fault.line) != 1:
            return f"stale: its line is {text.count(fault.line)} times in {fault.module}.py"
        source.write_text(text.replace(fault.line, fault.wrong))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *PYTEST, *fault.tests],
            cwd=place,
            env={**os.environ, "PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    if run.returncode == 0:
        return "survived"
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "caught by " + (
        failed[0].split(" - ")[0].split("::")[-1] if failed else run.stdout[-200:]
    )


def main(wanted: str = "") -> int:
    """Tries the faults whose name contains `wanted`, as many at once as there are cores. Returns
    how many were not caught.
    """
    chosen = [fault for fault in FAULTS if wanted in fault.name]
    missed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for fault, result in zip(chosen, pool.map(trial, chosen), strict=True):
            missed += not result.startswith("caught")
            print(f"{fault.name:<48} {result}", flush=True)
    print(f"{missed} of {len(chosen)} not caught")
    return missed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
