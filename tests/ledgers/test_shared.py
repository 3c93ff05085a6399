"""A ledger that two real users share: they lease, recall and reap across users, and nobody speaks for another."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_runtime.errors import BadSetting, GpuError, LedgerUnavailable, NotAllowed
from gpu_runtime.ledgers.setup import init
from gpu_runtime.ledgers.sqlite import files

from .people import Person, require_root, run

WORLD = "sim:8GiB,host:32GiB"
GROUP, STRANGERS = f"gpug{os.getpid()}", f"gpus{os.getpid()}"
ANN, BOB, OPS, EVE = (
    f"{name}{os.getpid()}" for name in ("ann", "bob", "ops", "eve")
)  # eve is not in the group


@pytest.fixture(scope="module")
def users() -> Iterator[None]:
    require_root()
    try:
        for group in (GROUP, STRANGERS):
            run("groupadd", group)
        for user in (ANN, BOB, OPS):
            run("useradd", "-M", "-N", "-g", STRANGERS, "-G", GROUP, user)
        run("useradd", "-M", "-N", "-g", STRANGERS, EVE)
        yield
    finally:
        for user in (ANN, BOB, OPS, EVE):
            run("bash", "-c", f"userdel {user} 2>/dev/null || true")
        for group in (GROUP, STRANGERS):
            run("bash", "-c", f"groupdel {group} 2>/dev/null || true")


class Box:
    """A machine with a shared ledger."""

    def __init__(self, root: Path) -> None:
        self.root, self.ledger, self.config = root, root / "ledger", root / "config.toml"
        self.people: list[Person] = []
        init(str(self.ledger), GROUP, str(self.config))

    def say(self, more: str) -> None:
        """Adds to the configuration."""
        self.config.write_text(f"{self.config.read_text()}\n{more}\n")

    def person(self, user: str) -> Person:
        entry = pwd.getpwnam(user)
        groups = [entry.pw_gid] + ([grp.getgrnam(GROUP).gr_gid] if user in (ANN, BOB, OPS) else [])
        self.people.append(Person(user, entry.pw_uid, groups, str(self.root / "state")))
        return self.people[-1]

    def kernel(self, user: str, **sizes: str) -> Person:
        """A process of the user with a runtime `rt`, which finds the ledger by the configuration."""
        person = self.person(user)
        told = person.say(
            f"rt = Runtime(devices={WORLD!r}, gpu_config_file={str(self.config)!r}, "
            "eviction_grace_seconds=0)"
        )
        assert told == "None", told
        for name, size in sizes.items():
            person.say(f"rt.register({name!r}, backend='fake', size={size!r})")
        return person

    def writer(self, user: str, claims: str = "") -> Person:
        """A process of the user with a bare `ledger`, whose every write goes through."""
        person = self.person(user)
        told = person.say(f"ledger = open_ledger({self.url!r}, user={claims!r})")
        assert told == "None", told
        return person

    @property
    def url(self) -> str:
        return f"sqlite://{self.world()}"

    def world(self) -> Path:
        return self.ledger / "sim-1x8.0GiB-host32.0GiB"

    def boot(self) -> Path:
        return next(
            path for path in self.world().iterdir() if re.fullmatch("[0-9a-f-]{36}", path.name)
        )


@pytest.fixture
def box(users: None) -> Iterator[Box]:
    root = Path(tempfile.mkdtemp(prefix="gpu-", dir="/tmp"))
    root.chmod(0o755)
    made = Box(root)
    yield made
    for person in made.people:
        person.end()
    shutil.rmtree(root, ignore_errors=True)


# Together


def test_members_lease_recall_and_reap_across_users(box):
    """Bob's model makes Ann's idle one step aside; when he is killed, his bytes are hers again."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB, ranker="5GiB")
    assert ann.say("rt.preload('writer').where") == "'sim:0'"
    assert bob.say("rt.preload('ranker', timeout=20).where") == "'sim:0'"
    assert ann.say("[l.where for l in rt.status().leases() if l.name == 'writer']") == "['host']"
    assert (
        ann.say("[e.by for e in rt.why('writer') if e.action == 'offloaded']")
        == f"['{BOB}, pid {bob.pid}']"
    )
    held = ann.say("sorted(map(tuple, rt.leases()[['model', 'user', 'pid']].values.tolist()))")
    assert held == repr([("ranker", BOB, bob.pid), ("writer", ANN, ann.pid)])
    bob.kill()
    assert ann.say("rt.preload('writer', timeout=20).where") == "'sim:0'"
    assert ann.say("[s.owner.user for s in rt.status().sections.values()]") == f"['{ANN}']"


def test_who_comes_first_makes_it_for_all_whatever_the_umask(box):
    """Four processes of two users open a world that is not there yet, all at once, under umask 077."""
    people = [box.person(user) for user in (ANN, BOB, ANN, BOB)]
    for person in people:
        person.send(f"rt = Runtime(devices={WORLD!r}, gpu_config_file={str(box.config)!r})")
    assert [person.answer() for person in people] == ["None"] * 4
    for person in people:
        assert (
            person.say("(rt.register('m', backend='fake', size='1GiB'), rt.preload('m').where)[1]")
            == "'sim:0'"
        )
    group = grp.getgrnam(GROUP).gr_gid
    for path in [box.ledger, *box.ledger.rglob("*")]:
        is_ = path.lstat()
        mode = stat.S_IMODE(is_.st_mode)
        if stat.S_ISLNK(is_.st_mode) or path.name == "ballast":
            continue
        expected = (
            (0o3770 if path.name in ("owners", "ledger", box.world().name) else 0o2770)
            if stat.S_ISDIR(is_.st_mode)
            else 0o640
            if path.parent.name == "owners" and path.suffix != ".bell"
            else 0o660
        )
        assert (path, oct(mode), is_.st_gid) == (path, oct(expected), group)


def test_who_is_not_in_the_group_is_told_so(box):
    box.kernel(ANN)
    eve = box.person(EVE)
    told = eve.say(f"Runtime(devices={WORLD!r}, gpu_config_file={str(box.config)!r})")
    assert told.startswith(
        f"LedgerUnavailable: the ledger {box.ledger} is shared by the group {GROUP}, and {EVE} is not "
        f"in it.   The operator can add you:  usermod -aG {GROUP} {EVE}"
    )


def test_which_ledger(box, monkeypatch, tmp_path):
    """GPU_LEDGER, else the machine's, else one's own."""
    from gpu_runtime import Runtime

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for settings, url in (
        ({"ledger": "memory:"}, "memory:"),
        ({"gpu_config_file": str(box.config)}, box.url),
        ({}, f"sqlite://{tmp_path}/gpu-console/ledger/{Path(box.url).name}"),
    ):
        with Runtime(
            devices=WORLD, **{"gpu_config_file": str(tmp_path / "none.toml"), **settings}
        ) as rt:
            assert rt.status().ledger == url


# Apart


def test_nobody_touches_another_users_proof_of_life(box):
    ann, bob = box.kernel(ANN), box.kernel(BOB)
    file = box.boot() / "owners" / ann.say("rt._session.me").strip("'")
    assert bob.say(f"open({str(file)!r}, 'rb').close()") == "None"
    for attempt in (
        f"os.unlink({str(file)!r})",
        f"open({str(file)!r}, 'r+b')",
        f"os.rename({str(file)!r}, '/tmp/away')",
        f"os.replace({str(box.config)!r}, {str(file)!r})",
    ):
        assert bob.say(attempt).startswith("PermissionError"), attempt


def test_nobody_is_led_elsewhere(box):
    """A member puts links in the place of the ledger's files: nothing that they lead to is opened, closed or
    changed."""
    ann, bob = box.kernel(ANN, writer="1GiB"), box.kernel(BOB)
    precious = box.root / "precious"
    precious.mkdir()
    diary = precious / "diary.db"
    diary.write_bytes(b"")
    precious.chmod(0o711)
    os.chown(diary, pwd.getpwnam(ANN).pw_uid, -1)
    diary.chmod(0o600)
    journal = box.world() / "journal" / "journal.db"
    bob.say(f"os.path.lexists({str(journal)!r}) and os.unlink({str(journal)!r})")
    assert bob.say(f"os.symlink({str(diary)!r}, {str(journal)!r})") == "None"
    book = box.boot() / os.readlink(box.boot() / "CURRENT")
    bob.say(f"os.unlink({str(book)!r})")
    assert bob.say(f"os.symlink({str(diary)!r}, {str(book)!r})") == "None"
    assert ann.say("rt.preload('writer').where") == "'sim:0'"
    is_ = diary.stat()
    assert (is_.st_size, oct(stat.S_IMODE(is_.st_mode)), is_.st_gid) == (0, oct(0o600), 0)
    for taken in (box.boot(), box.world(), box.ledger / ".shared"):
        assert bob.say(f"os.rename({str(taken)!r}, '{box.ledger}/away')").startswith(
            "PermissionError"
        ) is (taken.stat().st_uid != pwd.getpwnam(BOB).pw_uid), taken


def test_init_follows_no_link_of_a_member(box):
    """It runs as root: a member's link in the place of a directory must not hand anything over."""
    box.kernel(ANN)
    here = next(path for path in box.ledger.iterdir() if re.fullmatch("[0-9a-f-]{36}", path.name))
    shutil.rmtree(here / "owners")
    (here / "owners").symlink_to("/etc")
    before = os.stat("/etc")
    with pytest.raises(LedgerUnavailable, match="something else has taken its place"):
        init(str(box.ledger), GROUP, str(box.config))
    after = os.stat("/etc")
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)


def test_a_reader_does_not_keep_the_dead_alive(box):
    """Members may read an owner's file, and lock it for reading once its owner is dead; that is no life."""
    ann, bob, witness = box.kernel(ANN, writer="5GiB"), box.kernel(BOB), box.writer(OPS)
    bob.say("rt.close()")  # nobody but the witness is to look
    ann.say("rt.preload('writer')")
    me = ann.say("rt._session.me").strip("'")
    bob.say(f"f = open({str(box.boot() / 'owners' / me)!r}, 'rb')")
    assert witness.say("ledger.dead(ledger.read())") == "frozenset()"
    ann.kill()
    bob.say("fcntl.fcntl(f, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0))")
    assert witness.say("ledger.dead(ledger.read())") == f"frozenset({{'{me}'}})"


FORGE = """ledger.transact = lambda decide: ledger._decide_until_written(decide)
import gpu_runtime.ledgers.common as s
s.refuse_unlawful = lambda *a: None
""".replace("\n", "; ").rstrip("; ")


def test_a_row_in_anothers_name_is_not_believed(box):
    """Bob writes into the page, as Ann, that she wants her model evicted and kept: her process knows better."""
    ann, ann2, bob = box.kernel(ANN, writer="5GiB"), box.kernel(ANN), box.writer(BOB)
    ann.say("rt.preload('writer')")
    ann2.say("(rt.register('m', backend='fake', size='1GiB'), rt.preload('m'))[1].where")
    me, other = (person.say("rt._session.me").strip("'") for person in (ann, ann2))
    bob.say(FORGE)
    for verb, recalls in (("evict", (f"{me}/writer",)), ("pin", ())):
        assert (
            bob.say(
                f"ledger.transact(lambda book: (book.with_ticket(Ticket('{other}:99:x', '{other}', {verb!r}, "
                f"'{me}/writer', 0.0, 0.0, recalls={recalls!r})), 'written'))"
            )
            == "'written'"
        )
        ann.say("rt.tick()")
        assert (
            ann.say("[(l.where, l.keep) for l in rt.status().leases() if l.name == 'writer']")
            == "[('sim:0', False)]"
        )


def test_a_claimed_user_is_not_believed(box):
    """Bob says he is Ann: what he asks in her name is not done, and the table shows that it is unproven."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.writer(BOB, claims=ANN)
    ann.say("rt.preload('writer')")
    me = ann.say("rt._session.me").strip("'")
    bob.say("put(ledger, 'x')")
    assert (
        bob.say(
            f"ledger.transact(lambda book: (book.with_ticket(Ticket('k', ledger.owner.id, 'pin', '{me}/writer', "
            f"0.0, 0.0)), 'written'))"
        )
        == "'written'"
    )
    ann.say("rt.tick()")
    assert ann.say("[l.keep for l in rt.status().leases() if l.name == 'writer']") == "[False]"
    assert ann.say("sorted(set(rt.leases()['user']))") == repr([ANN, f"{ANN} (unproven)"])


def test_another_user_may_ask_to_step_aside_and_nothing_else(box):
    """Loading, pinning, restoring and defragmenting run something in a process: they are its user's to ask."""
    ann, ann2, bob = box.kernel(ANN, writer="5GiB"), box.kernel(ANN), box.kernel(BOB, ranker="1GiB")
    ann.say("rt.preload('writer')")
    for verb in ("pin", "unpin", "preload", "restore"):
        refused = bob.say(f"rt.{verb}('writer')")
        assert (
            refused.startswith("NotAllowed: ")
            and f"in pid {ann.pid}: only {ANN} or an operator may" in refused
        )
    assert bob.say("rt.defrag().done") == "True"
    assert bob.say("rt.evict('writer').done") == "True"
    assert (
        ann.say("[e.by for e in rt.why('writer') if e.action == 'offloaded']")
        == f"['{BOB}, pid {bob.pid}']"
    )
    assert ann2.say("rt.preload('writer').done") == "True"
    assert ann2.say("rt.pin('writer').done") == "True"
    assert bob.say("rt.evict('writer')").startswith("StillInUse: writer is kept")


def test_members_see_each_others_maps_and_nobody_forges_one(box):
    """Under everybody's umask of 077 the group reads them. Bob may put a file in Ann's name: it is not hers."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB)
    ann.say("rt.preload('writer')")
    ann.say("rt.tick()")
    me = ann.say("rt._session.me").strip("'")
    seen = "[(m.owner, m.allocated_bytes >> 30) for m in rt.allocator_maps()]"
    assert bob.say(seen) == f"[('{me}', 5)]"
    file = box.boot() / "owners" / f"{me}.map"
    assert (stat.S_IMODE(file.stat().st_mode), grp.getgrgid(file.stat().st_gid).gr_name) == (
        0o640,
        GROUP,
    )
    assert bob.say(f"os.replace({str(file)!r}, '/tmp/x')").startswith("PermissionError")
    ann.say("rt._session.maps._ledger._maps.withdraw(rt._session.me)")
    assert bob.say(f"Path({str(file)!r}).write_bytes(b'[]')") == "2"
    assert bob.say(seen) == "[]"


def test_the_owner_refuses_whoever_did_not_refuse_himself(box):
    """Bob's process has had its own check taken out; Ann's has not."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB)
    ann.say("rt.preload('writer')")
    bob.say("from gpu_runtime.owner import permissions")
    bob.say("permissions.refusal_of_request = lambda *a: ''")
    told = bob.say("rt.pin('writer')")
    assert told.startswith(f"GpuError: {BOB} may not pin writer in pid {ann.pid}"), told
    assert ann.say("[l.keep for l in rt.status().leases()]") == "[False]"


def test_a_name_from_the_page_only_chooses_among_registered_models(box):
    """It is no path, no code and no way to a third process."""
    ann, other = box.kernel(ANN, writer="1GiB"), box.kernel(ANN, reader="1GiB")
    other.say("rt.preload('reader')"), other.say("rt.evict('reader')")
    evil = box.root / "evil"
    ann.say("from gpu_runtime.owner import maintenance")
    ann.say("from gpu_runtime.scheduler.recall import Order")
    other.say("from gpu_runtime.facts import LeaseId")
    other.say("from gpu_runtime.owner import requests")
    for name in (str(evil), f"reader@{other.pid}", f"__import__('os').system('touch {evil}')"):
        assert "has not registered" in other.say(
            f"requests.request(rt._session, 'preload', LeaseId({ann.say('rt._session.me')}, {name!r}), "
            "timeout=10).because"
        )
        ann.say(f"maintenance.carry_out_order(rt._session, Order('k', 'preload', {name!r}))")
        assert ann.say("rt.status().events[-1].action") == "'failed'"
    assert other.say("[l.where for l in rt.status().leases()]") == "['host']" and not evil.exists()


def test_operators_may_ask_everything(box):
    box.say(f'[operators]\nusers = ["{OPS}"]')
    ann, ops = box.kernel(ANN, writer="5GiB"), box.kernel(OPS)
    ann.say("rt.preload('writer')")
    assert ops.say("rt.pin('writer').done") == "True"
    told, until = (
        f"writer is kept on its device, as {OPS}, pid {ops.pid} asked",
        time.monotonic() + 10,
    )
    while told not in ann.say(
        "[e.because for e in rt.status().events]"
    ):  # the answer follows the deed
        assert time.monotonic() < until
    assert ops.say("rt.unpin('writer').done") == "True"


def test_nobody_speaks_for_another_when_the_book_is_rebuilt(box):
    """Bob's own file says that Ann holds 7 GiB and wants more. It is his file: it counts for him alone."""
    box.kernel(OPS)
    ann, bob = box.writer(ANN), box.writer(BOB)
    ann.say("put(ledger, 'writer')")
    id = ann.say("ledger.owner.id").strip("'")
    bob.say(f"lie = Book(sections={{{id!r}: ledger.read().sections[{id!r}]}})")
    bob.say(
        f"lie = replace(lie.with_lease(Lease({id!r}, 'lie', shares=(Share('sim:0', 7 << 30),))), "
        f"tickets=(Ticket('k', {id!r}, 'use', 'more', 0.0, 0.0),))"
    )
    assert bob.say("ledger._store.owner_file.write_roster(encode(lie), rev=5, schema=1)") == "None"
    os.unlink(box.boot() / os.readlink(box.boot() / "CURRENT"))
    assert ann.say("(names(ledger), ledger.read().tickets)") == "(['writer'], ())"


# The operator's caps


def test_bytes_count_for_all_of_a_users_processes(box):
    """Ann's idle model in another kernel steps aside for her; with both in use, the cap is named."""
    box.say(f'[users.{ANN}]\nbytes_per_device = "5 GiB"')
    one, two = box.kernel(ANN, a="3GiB"), box.kernel(ANN, b="3GiB")
    one.say("rt.preload('a')")
    assert two.say("rt.preload('b', timeout=20).where") == "'sim:0'"
    assert one.say("[l.where for l in rt.status().leases() if l.name == 'a']") == "['host']"
    two.say("held = rt.use('b')")
    two.say("model = held.__enter__()")
    two.say("rt.tick()")
    told = one.say("rt.preload('a')")
    assert told.startswith(
        f"NotAllowed: a needs 3.0 GiB; {ANN} may hold at most 5.0 GiB on sim:0 (cap [users.{ANN}] "
        f"bytes_per_device in {box.config}); 3.0 GiB there cannot leave now."
    ), told


def test_a_groups_caps_hold_for_each_member(box):
    box.say(f'[groups.{GROUP}]\nimportance = "normal"\nkeep = false')
    ann = box.kernel(ANN, a="1GiB")
    assert f"(cap [groups.{GROUP}] importance in {box.config})" in ann.say(
        "rt.use('a', importance='high').__enter__()"
    )
    assert f"{ANN} may not keep a on a device (cap [groups.{GROUP}] keep in" in ann.say(
        "rt.pin('a')"
    )
    assert ann.say("rt.preload('a').done") == "True"


def test_a_block_held_for_too_long_is_told_and_nothing_new_is_granted(box):
    """Its memory is in use, so it is not taken away; its user waits for it, in every kernel of theirs."""
    box.say(f'[users.{ANN}]\nlongest_lease = "1s"')
    one, two = box.kernel(ANN), box.kernel(ANN, a="1GiB")
    one.say("held = rt.lease('1GiB', purpose='training')")
    one.say("block = held.__enter__()")
    assert two.say("rt.preload('a').done") == "True"
    two.say("rt.evict('a')")
    time.sleep(1.1)
    one.say("rt.tick()")
    assert "training#1 (1.0 GiB)" in one.say(
        "[e.because for e in rt.status().events if e.action == 'overstayed']"
    )
    told = two.say("rt.preload('a')")
    assert (
        told.startswith("NotAllowed: ")
        and f"(cap [users.{ANN}] longest_lease in {box.config})" in told
    )
    one.say("held.__exit__(None, None, None)")
    assert two.say("rt.preload('a', timeout=20).done") == "True"


# gpu ledger init


def test_init_twice_is_init_once(box):
    before = box.config.read_text()
    told = init(str(box.ledger), GROUP, str(box.config))
    assert "is shared already by" in told.because and box.config.read_text() == before


def test_init_adds_the_ledger_to_a_configuration_that_is_there(users, tmp_path):
    root = Path(tempfile.mkdtemp(prefix="gpu-", dir="/tmp"))
    root.chmod(0o755)
    try:
        config = root / "config.toml"
        config.write_text("[users.ann]\nkeep = false\n")
        init(str(root / "ledger"), GROUP, str(config))
        assert (
            config.read_text()
            == f'ledger = "sqlite://{root}/ledger"\n\n[users.ann]\nkeep = false\n'
        )
        with pytest.raises(GpuError, match="names another ledger already"):
            init(str(root / "other"), GROUP, str(config))
        assert not (root / "other").exists()
    finally:
        shutil.rmtree(root)


def test_init_refuses_what_makes_no_sense(box, monkeypatch):
    """Nothing is made then."""
    root = box.root
    (root / "full").mkdir()
    (root / "full" / "thesis.tex").touch()
    (root / "closed").mkdir(mode=0o700)
    (root / "open").mkdir()
    (root / "open").chmod(0o777)
    (root / "link").symlink_to(box.ledger)
    for place, group, why in (
        (
            root / "new",
            "nogroup-of-that-name",
            "a group of this machine; make it with:  groupadd nogroup-of-that-name",
        ),
        (box.ledger, STRANGERS, f"it is shared by {GROUP} already"),
        (root / "full", GROUP, "there is something else in it"),
        (root / "closed" / "ledger", GROUP, "is closed to them"),
        (root / "open" / "ledger", GROUP, "everybody may write"),
        (root / "link", GROUP, "a directory, or a name that is free"),
        (root / "no" / "parent", GROUP, "mkdir -p -m 755"),
        (Path("ledger"), GROUP, "an absolute path"),
    ):
        with pytest.raises(BadSetting) as error:
            init(str(place), group, str(root / "other.toml"))
        assert why in str(error.value)
    monkeypatch.setattr(files, "file_system_of", lambda path: "nfs4")
    with pytest.raises(BadSetting, match="network file system .nfs4."):
        init(str(root / "new"), GROUP, str(root / "other.toml"))
    assert not (root / "new").exists() and not (root / "other.toml").exists()


def test_init_is_roots(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotAllowed, match="As root:  gpu ledger init --group gpu /srv/ledger"):
        init("/srv/ledger", "gpu", "/etc/gpu-console/config.toml")
