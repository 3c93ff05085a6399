"""A ledger that real users share. They lease, recall and reap across users, and cannot forge
anything.
"""

import grp
import os
import pwd
import re
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from gpu_runtime.errors import BadSetting, GpuError, LedgerUnavailable, NotAllowed
from gpu_runtime.ledgers import setup
from gpu_runtime.ledgers.keeper.ledger import KeeperPeek, answers
from gpu_runtime.ledgers.keeper.wire import SOCKET
from gpu_runtime.ledgers.liveness import boot_id
from gpu_runtime.ledgers.setup import init
from tests.clock import PATIENCE, until

from .people import Person, require_root, run_command

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
            run_command("groupadd", group)
        for user in (ANN, BOB, OPS):
            run_command("useradd", "-M", "-N", "-g", STRANGERS, "-G", GROUP, user)
        run_command("useradd", "-M", "-N", "-g", STRANGERS, EVE)
        yield
    finally:
        for user in (ANN, BOB, OPS, EVE):
            run_command("bash", "-c", f"userdel {user} 2>/dev/null || true")
        for group in (GROUP, STRANGERS):
            run_command("bash", "-c", f"groupdel {group} 2>/dev/null || true")


class Box:
    """A machine with a shared ledger."""

    def __init__(self, root: Path) -> None:
        self.root, self.ledger, self.config = root, root / "ledger", root / "config.toml"
        self.people: list[Person] = []
        self.place = self.world()  # of the book that `writer` opens
        init(str(self.ledger), GROUP, str(self.config))

    def configure(self, more: str) -> None:
        """Adds lines to the machine's configuration file."""
        self.config.write_text(f"{self.config.read_text()}\n{more}\n")

    def person(self, user: str) -> Person:
        entry = pwd.getpwnam(user)
        groups = [entry.pw_gid] + ([grp.getgrnam(GROUP).gr_gid] if user in (ANN, BOB, OPS) else [])
        self.people.append(Person(user, entry.pw_uid, groups, str(self.root / "state")))
        return self.people[-1]

    def kernel(self, user: str, **sizes: str) -> Person:
        """A process of `user` with a runtime `rt`, which finds the ledger in the configuration."""
        person = self.person(user)
        reply = person.run(
            f"rt = Runtime(devices={WORLD!r}, gpu_config_file={str(self.config)!r}, "
            "eviction_grace_seconds=0)"
        )
        assert reply == "None", reply
        for name, size in sizes.items():
            person.run(f"rt.register({name!r}, backend='fake', size={size!r})")
        return person

    def writer(self, user: str, claims: str = "") -> Person:
        """A process of `user` with an open `ledger`. With `claims` it pretends to be that user."""
        person = self.person(user)
        reply = person.run(f"ledger = open_ledger({self.url!r}, user={claims!r})")
        assert reply == "None", reply
        return person

    @property
    def url(self) -> str:
        return f"keeper://{self.place}"

    def world(self) -> Path:
        return self.ledger / "sim-1x8.0GiB-host32.0GiB"

    def boot(self) -> Path:
        return self.place / boot_id()

    def end_service(self) -> None:
        """Ends the keepers that root runs for this ledger."""
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "gpu_runtime.ledgers.keeper.server" in command and str(self.ledger) in command[-1]:
                process.kill()


@pytest.fixture
def box(users: None) -> Iterator[Box]:
    root = Path(tempfile.mkdtemp(prefix="gpu-", dir="/tmp"))
    root.chmod(0o755)
    made = Box(root)
    yield made
    for person in made.people:
        person.end()
    made.end_service()
    shutil.rmtree(root, ignore_errors=True)


# Sharing


class Service:
    """The keeper as root's service, with a stand-in for systemd that keeps the book's descriptor."""

    def __init__(self, box: Box, *within: str, passes: Sequence[int] = ()) -> None:
        """The words `within` are a command that runs the keeper, and gets the descriptors that are passed."""
        self.within, self.passes = within, passes
        self.ledger, self.address = box.ledger, str(box.root / "notify")
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.bind(self.address)
        self.systemd.settimeout(PATIENCE)
        self.kept: list[int] = []
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "gpu_runtime.ledgers.keeper.server"]
        self.process = subprocess.Popen(
            [*self.within, *command, "--ledger", str(self.ledger)],
            env={**os.environ, "NOTIFY_SOCKET": self.address},
            pass_fds=[*self.kept, *self.passes],
        )
        while (said := socket.recv_fds(self.systemd, 1000, 1))[0] != b"READY=1":
            self.kept += said[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.systemd.close()
        for descriptor in self.kept:
            os.close(descriptor)


@pytest.fixture
def service(box: Box) -> Iterator[Service]:
    box.end_service()
    box.place = box.ledger
    made = Service(box)
    yield made
    made.close()


def test_members_share_the_book_of_a_service(box, service):
    """Root's keeper knows each member by the socket, and systemd keeps the book while it restarts."""
    use_and_restart(box, service)


def test_the_service_needs_no_more_than_its_unit_allows(box):
    """The capabilities are those of the unit, and all but the ledger is read-only, as with ProtectSystem=strict."""
    box.end_service()
    until(lambda: not answers(box.ledger / boot_id()))
    shutil.rmtree(box.ledger / boot_id())  # as after a boot: the keeper makes the directories
    [line] = [line for line in setup.UNIT.splitlines() if line.startswith("CapabilityBoundingSet=")]
    names = [name.removeprefix("CAP_").lower() for name in line.partition("=")[2].split()]
    only = f"--bounding-set=-all,{','.join(f'+{name}' for name in names)}"
    mounts = f"mount --bind {box.ledger} {box.ledger} && mount -o remount,bind,ro / && exec"
    setpriv = f"setpriv --no-new-privs --inh-caps=-all {only}"
    if run_in_namespace("true").returncode:
        pytest.skip("no mount namespace can be made here")
    box.place = box.ledger
    service = Service(box, "unshare", "--mount", "sh", "-c", f'{mounts} {setpriv} "$@"', "sh")
    try:
        status = Path(f"/proc/{service.process.pid}/status").read_text()
        assert int(status.partition("CapEff:")[2].split()[0], 16).bit_count() == len(names)
        assert {path.name: f"{stat.S_IMODE(path.stat().st_mode):o}" for path in box.ledger.iterdir()} == {
            ".shared": "660", "journal": "2770", "journals": "3770", boot_id(): "2770", f"{boot_id()}.owners": "3770",
        }  # fmt: skip
        use_and_restart(box, service)
        service.kept.clear()  # systemd has lost the book: a member's memory file has it
        service.kill()
        service.start()
        assert box.writer(BOB).run("names(ledger)") == "['qwen']"
    finally:
        service.close()


def run_in_namespace(command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["unshare", "--mount", "sh", "-c", command], capture_output=True)


def use_and_restart(box: Box, service: Service) -> None:
    ann, bob = box.writer(ANN, claims=BOB), box.writer(BOB)
    ann.run("put(ledger, 'qwen')")
    assert bob.run("names(ledger)") == "['qwen']"
    assert bob.run("[s.owner.user for s in ledger.read().sections.values()]") == f"['{ANN}']"
    ann.kill()
    service.kill()
    service.start()
    assert bob.run("names(ledger)") == "['qwen']"
    assert bob.run("len(ledger.dead(ledger.read()))") == "1"


def test_who_connects_while_the_service_restarts_waits(box):
    """systemd has the socket open, and passes it to each keeper. No member can replace it."""
    box.end_service()
    until(lambda: not answers(box.ledger / boot_id()))
    box.place = box.ledger
    own, link = box.ledger / SOCKET, box.boot() / SOCKET
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(own))
        os.chown(own, 0, grp.getgrnam(GROUP).gr_gid)
        own.chmod(0o660)
        opened.listen()
        number = opened.fileno()
        give = f'LISTEN_FDS=1 LISTEN_PID=$$ exec "$@" 3<&{number}'
        service = Service(box, "bash", "-c", give, "bash", passes=[number])
        try:
            assert os.readlink(link) == f"../{SOCKET}"
            ann, bob = box.writer(ANN), box.writer(BOB)
            ann.run("put(ledger, 'qwen')")
            bob.run(f"ledger.patience_seconds = {PATIENCE}")
            service.kill()
            bob.send("names(ledger)")
            until(lambda: select.select([opened], [], [], 0)[0], "bob has connected")
            assert not select.select([bob.process.stdout], [], [], 0)[0]
            service.start()
            assert bob.answer() == "['qwen']"
            assert "PermissionError" in ann.run(f"os.rename({str(own)!r}, {str(own)!r} + '.old')")
            ann.run(
                f"os.unlink({str(link)!r}); import socket; squat = socket.socket(socket.AF_UNIX)"
            )
            ann.run(f"squat.bind({str(link)!r})")
            until(link.is_symlink, "the keeper has put its link back")
            assert box.writer(BOB).run("names(ledger)") == "['qwen']"
            own.unlink()  # as an operator may
            until(lambda: link.is_socket() and not link.is_symlink())
            assert box.writer(BOB).run("names(ledger)") == "['qwen']"
        finally:
            service.close()


def test_a_member_starts_no_keeper_and_trusts_none_of_another_member(box, service):
    """The socket's name is in a directory that all members write."""
    service.kill()
    bob = box.person(BOB)
    reply = bob.run(f"KeeperLedger(Path({str(box.place)!r}), patience_seconds=0.3)")
    assert f"root must start it:  gpu ledger init --group {GROUP} {box.ledger}" in reply
    squatter = box.person(ANN)
    boot = box.boot()
    squatter.run(f"import socket, os; os.unlink('{boot}/keeper.sock')")
    squatter.run("squat = socket.socket(socket.AF_UNIX)")
    squatter.run(
        f"squat.bind('{boot}/keeper.sock'), os.chmod('{boot}/keeper.sock', 0o777), squat.listen()"
    )
    reply = bob.run(f"open_ledger({box.url!r})")
    assert f"it is run by {ANN}, and the ledger is root's" in reply


def test_members_lease_recall_and_reap_across_users(box):
    """Bob's model evicts Ann's idle model. When Bob's process is killed, its bytes are free again."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB, ranker="5GiB")
    assert ann.run("rt.preload('writer').where") == "'sim:0'"
    assert bob.run(f"rt.preload('ranker', timeout={PATIENCE}).where") == "'sim:0'"
    assert ann.run("[l.where for l in rt.status().leases() if l.name == 'writer']") == "['host']"
    assert (
        ann.run("[e.by for e in rt.why('writer') if e.action == 'offloaded']")
        == f"['{BOB}, pid {bob.pid}']"
    )
    held = ann.run("sorted(map(tuple, rt.leases()[['model', 'user', 'pid']].values.tolist()))")
    assert held == repr([("ranker", BOB, bob.pid), ("writer", ANN, ann.pid)])
    bob.kill()
    assert ann.run(f"rt.preload('writer', timeout={PATIENCE}).where") == "'sim:0'"
    assert ann.run("[s.owner.user for s in rt.status().sections.values()]") == f"['{ANN}']"


def test_the_first_process_makes_the_files_for_all_whatever_the_umask(box):
    """Four processes of two users open a new ledger at the same time, under umask 077."""
    people = [box.person(user) for user in (ANN, BOB, ANN, BOB)]
    for person in people:
        person.send(f"rt = Runtime(devices={WORLD!r}, gpu_config_file={str(box.config)!r})")
    assert [person.answer() for person in people] == ["None"] * 4
    for person in people:
        assert (
            person.run("(rt.register('m', backend='fake', size='1GiB'), rt.preload('m').where)[1]")
            == "'sim:0'"
        )
    journals = box.ledger / "journals"
    users = {path: 0o2750 for path in journals.iterdir()}
    sticky = dict.fromkeys((box.ledger, box.world(), journals), 0o3770)
    for path, mode in {**sticky, **users, box.boot(): 0o2770}.items():
        found = path.stat()
        assert (path, oct(stat.S_IMODE(found.st_mode))) == (path, oct(mode))
        assert grp.getgrgid(found.st_gid).gr_name == GROUP
    keeper = (box.boot() / "keeper.sock").stat()
    assert (keeper.st_uid, stat.S_IMODE(keeper.st_mode)) == (0, 0o660)


def test_the_keeper_of_a_ledger_without_systemd_is_started_again(box):
    ann = box.kernel(ANN, writer="1GiB")
    ann.run("rt.preload('writer')")
    before = KeeperPeek(box.ledger / boot_id())
    until(lambda: before.look() is not None)
    os.kill(before._wire.keeper_pid, signal.SIGKILL)
    until(lambda: KeeperPeek(box.ledger / boot_id()).look() is not None)
    assert "its keeper runs" in init(str(box.ledger), GROUP, str(box.config)).because
    assert ann.run("[l.where for l in rt.status().leases()]") == "['sim:0']"


def test_a_user_outside_the_group_gets_a_clear_error(box):
    box.kernel(ANN)
    eve = box.person(EVE)
    reply = eve.run(f"Runtime(devices={WORLD!r}, gpu_config_file={str(box.config)!r})")
    assert reply.startswith(
        f"LedgerUnavailable: the ledger {box.ledger} is shared by the group {GROUP}, and {EVE} is not "
        f"in it.   The operator can add you:  usermod -aG {GROUP} {EVE}"
    )


def test_which_ledger_is_opened(box, monkeypatch, tmp_path):
    """The order is: GPU_LEDGER, then the machine's ledger, then the user's own ledger."""
    from gpu_runtime import Runtime

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for settings, url in (
        ({"ledger": "memory:"}, "memory:"),
        ({"gpu_config_file": str(box.config)}, box.url),
        ({}, f"keeper://{tmp_path}/gpu-console/ledger/{Path(box.url).name}"),
    ):
        with Runtime(
            devices=WORLD, **{"gpu_config_file": str(tmp_path / "none.toml"), **settings}
        ) as rt:
            assert rt.status().ledger == url


# Protection


def test_links_of_a_member_are_not_followed(box):
    """A member replaces the ledger's files by links. The targets of the links are not opened or
    changed.
    """
    ann, bob = box.kernel(ANN, writer="1GiB"), box.kernel(BOB)
    precious = box.root / "precious"
    precious.mkdir()
    diary = precious / "diary.db"
    diary.write_bytes(b"")
    precious.chmod(0o711)
    os.chown(diary, pwd.getpwnam(ANN).pw_uid, -1)
    diary.chmod(0o600)
    history = box.world() / "journal" / "history.db"
    bob.run(f"os.path.lexists({str(history)!r}) and os.unlink({str(history)!r})")
    assert bob.run(f"os.symlink({str(diary)!r}, {str(history)!r})") == "None"
    assert ann.run("rt.preload('writer').where") == "'sim:0'"
    is_ = diary.stat()
    assert (is_.st_size, oct(stat.S_IMODE(is_.st_mode)), is_.st_gid) == (0, oct(0o600), 0)
    for taken in (box.boot(), box.world(), box.ledger / ".shared"):
        assert bob.run(f"os.rename({str(taken)!r}, '{box.ledger}/away')").startswith(
            "PermissionError"
        ) is (taken.stat().st_uid != pwd.getpwnam(BOB).pw_uid), taken


def journal(box: Box, user: str) -> Path:
    return box.ledger / "journals" / str(pwd.getpwnam(user).pw_uid) / f"{box.world().name}.db"


def test_each_user_has_a_journal_and_all_members_read_all(box):
    """`rt.why`, `rt.events`, the console and the routes show what the processes of all users did."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB, ranker="5GiB")
    ann.run("rt.preload('writer')")
    bob.run(f"rt.preload('ranker', timeout={PATIENCE})")
    for person in (ann, bob):
        person.run("rt.close()")
        assert stat.S_IMODE(journal(box, person.user).stat().st_mode) == 0o640
    ops = box.kernel(OPS)
    actions = "[(e.model, e.action) for e in rt.why({!r}) if e.action in ('loaded', 'offloaded')]"
    assert ops.run(actions.format("writer")) == "[('writer', 'offloaded'), ('writer', 'loaded')]"
    assert ops.run(actions.format("ranker")) == "[('ranker', 'loaded')]"
    kept = "[e.wall for e in rt._session.journal.tail()]"
    assert ops.run(f"(lambda walls: (len(walls) > 3, walls == sorted(walls)))({kept})") == (
        "(True, True)"
    )


def test_no_member_can_change_another_users_journal(box):
    ann, bob = box.kernel(ANN, writer="1GiB"), box.kernel(BOB)
    ann.run("(rt.preload('writer'), rt._session.journal.flush())")
    file = journal(box, ANN)
    before = file.read_bytes()
    for attempt in (
        f"open({str(file)!r}, 'r+b')",
        f"os.unlink({str(file)!r})",
        f"open('{file}-journal', 'wb')",
        f"os.symlink('/tmp', '{file.parent}/x')",
        f"os.rename({str(file.parent)!r}, '{file.parent}x')",
        f"os.rename({str(file.parents[1])!r}, '{file.parents[1]}x')",
    ):
        assert bob.run(attempt).startswith("PermissionError"), attempt
    assert file.read_bytes() == before


@pytest.mark.parametrize("taken_by", ["a directory", "a link", "a file"])
def test_a_journal_in_a_place_that_another_user_took_is_not_written(box, taken_by):
    """Bob takes the place of Ann's journal before her process starts. Her events then stay in
    memory only.
    """
    bob = box.person(BOB)
    place, diary = journal(box, ANN).parent, box.root / "diary"
    diary.mkdir()
    os.chown(diary, pwd.getpwnam(ANN).pw_uid, -1)
    take = {
        "a directory": f"(os.mkdir({str(place)!r}), os.chmod({str(place)!r}, 0o777))",
        "a link": f"os.symlink({str(diary)!r}, {str(place)!r})",
        "a file": f"open({str(place)!r}, 'w').close()",
    }[taken_by]
    assert "Error" not in bob.run(take)
    ann = box.kernel(ANN, writer="1GiB")
    assert ann.run("rt.preload('writer').where") == "'sim:0'"
    ann.run("rt._session.journal.flush()")
    assert ann.run("'writer' in [e.model for e in rt.events().itertuples()]") == "True"
    assert list(diary.iterdir()) == [] and not list(place.glob("*.db"))


def test_a_file_that_another_user_made_a_journal_is_not_read(box):
    """Bob's file is not read: neither in a directory with Ann's uid, nor as a pipe that never ends,
    nor as a database whose query never ends.
    """
    ann, bob = box.kernel(ANN, writer="1GiB"), box.kernel(BOB)
    ann.run("(rt.preload('writer'), rt._session.journal.flush())")
    bob.run("rt._session.journal.flush()")
    own = journal(box, BOB)
    bob.run(f"own, root = Path({str(own)!r}), Path({str(own.parents[1])!r})")
    bob.run("own.parent.mkdir(0o750, exist_ok=True)")
    for uid in (0, 1, pwd.getpwnam(OPS).pw_uid):
        bob.run(f"(root / '{uid}').mkdir()")
        bob.run(f"__import__('shutil').copy({str(journal(box, ANN))!r}, root / '{uid}' / own.name)")
    seen = "len(rt._session.journal.tail())"
    count = ann.run(seen)
    assert int(count) > 0
    bob.run("(own.unlink(missing_ok=True), os.mkfifo(own, 0o640))")
    assert ann.run(seen) == count
    endless = (
        "CREATE VIEW events AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id+1 FROM n) "
        "SELECT id, 1e12 AS wall, 'm' AS model, 'x' AS body FROM n"
    )
    bob.run("(own.unlink(), own.touch(), own.chmod(0o640))")
    bob.run(f"import sqlite3; db = sqlite3.connect(own); db.execute({endless!r}); db.commit()")
    assert ann.run(seen) == count


def test_init_follows_no_link_of_a_member(box):
    """The command runs as root. If a member puts a link in place of a directory, the link's target
    must not change.
    """
    box.kernel(ANN)
    here = next(path for path in box.ledger.iterdir() if re.fullmatch("[0-9a-f-]{36}", path.name))
    shutil.rmtree(here.with_suffix(".owners"))
    here.with_suffix(".owners").symlink_to("/etc")
    before = os.stat("/etc")
    with pytest.raises(LedgerUnavailable, match="something else has taken its place"):
        init(str(box.ledger), GROUP, str(box.config))
    after = os.stat("/etc")
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)


def test_a_request_in_another_users_name_does_not_reach_the_book(box):
    """Bob pretends to be Ann, and requests in her name. The keeper knows him by his socket."""
    ann, bob = box.kernel(ANN, writer="5GiB"), box.writer(BOB, claims=ANN)
    ann.run("rt.preload('writer')")
    me = ann.run("rt._session.me").strip("'")
    bob.run("put(ledger, 'x')")
    bob.run("import gpu_runtime.ledgers.keeper.ledger as client")
    bob.run("client.refuse_unlawful = lambda *_: None")
    for owner, verb, recalls in (
        (f"'{me}'", "evict", {f"{me}/writer": 0}),
        ("ledger.owner.id", "pin", {}),
    ):
        ticket = f"Ticket('k', {owner}, {verb!r}, '{me}/writer', 0.0, 0.0, recalls={recalls!r})"
        bob.run(f"ledger.transact(lambda book: (book.with_ticket({ticket}), 'written'))")
        ann.run("rt.tick()")
        assert ann.run(
            "[(l.where, l.keep) for l in rt.status().leases() if l.name == 'writer']"
        ) == ("[('sim:0', False)]")
    assert ann.run("sorted(set(rt.leases()['user']))") == repr(sorted([ANN, BOB]))


def test_another_user_may_request_an_eviction_and_nothing_else(box):
    """Loading, pinning and restoring run code in a process, so only its own user may request them."""
    ann, ann2, bob = box.kernel(ANN, writer="5GiB"), box.kernel(ANN), box.kernel(BOB, ranker="1GiB")
    ann.run("rt.preload('writer')")
    for verb in ("pin", "unpin", "preload", "restore"):
        refused = bob.run(f"rt.{verb}('writer')")
        assert (
            refused.startswith("NotAllowed: ")
            and f"in pid {ann.pid}: only {ANN} or an operator may" in refused
        )
    assert bob.run("rt.defrag().done") == "True"
    assert bob.run("rt.evict('writer').done") == "True"
    assert (
        ann.run("[e.by for e in rt.why('writer') if e.action == 'offloaded']")
        == f"['{BOB}, pid {bob.pid}']"
    )
    assert ann2.run("rt.preload('writer').done") == "True"
    assert ann2.run("rt.pin('writer').done") == "True"
    assert bob.run("rt.evict('writer')").startswith("StillInUse: writer is pinned")


def test_members_see_each_others_maps(box):
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB)
    ann.run("(rt.preload('writer'), rt.tick())")
    me = ann.run("rt._session.me").strip("'")
    assert bob.run("[(m.owner, m.allocated_bytes >> 30) for m in rt.allocator_maps()]") == (
        f"[('{me}', 5)]"
    )


def test_the_owner_refuses_what_the_caller_should_have_refused(box):
    """The check is removed in Bob's process, which requests. Ann's process, which owns the model,
    checks as well.
    """
    ann, bob = box.kernel(ANN, writer="5GiB"), box.kernel(BOB)
    ann.run("rt.preload('writer')")
    bob.run("from gpu_runtime.owner import requests")
    bob.run("requests.refusal_of_request = lambda *a: ''")
    reply = bob.run("rt.pin('writer')")
    assert reply.startswith(f"GpuError: {BOB} may not pin writer in pid {ann.pid}"), reply
    assert ann.run("[l.keep for l in rt.status().leases()]") == "[False]"


def test_a_name_in_the_book_only_selects_a_registered_model(box):
    """A model's name in the book selects a registered model. It is not used as a path, as code, or
    to reach a third process.
    """
    ann, other = box.kernel(ANN, writer="1GiB"), box.kernel(ANN, reader="1GiB")
    other.run("rt.preload('reader')"), other.run("rt.evict('reader')")
    evil = box.root / "evil"
    ann.run("from gpu_runtime.owner import maintenance")
    ann.run("from gpu_runtime.scheduler.recall import Order")
    other.run("from gpu_runtime.facts import LeaseId")
    other.run("from gpu_runtime.owner import requests")
    for name in (str(evil), f"reader@{other.pid}", f"__import__('os').system('touch {evil}')"):
        assert "no model is called" in other.run(
            f"requests.request(rt._session, 'preload', LeaseId({ann.run('rt._session.me')}, {name!r}), "
            f"timeout={PATIENCE}).because"
        )
        ann.run(f"maintenance.carry_out_order(rt._session, Order('k', 'preload', {name!r}))")
        assert ann.run("rt.status().events[-1].action") == "'failed'"
    assert other.run("[l.where for l in rt.status().leases()]") == "['host']" and not evil.exists()


def test_operators_may_request_everything(box):
    box.configure(f'[operators]\nusers = ["{OPS}"]')
    ann, ops = box.kernel(ANN, writer="5GiB"), box.kernel(OPS)
    ann.run("rt.preload('writer')")
    assert ops.run("rt.pin('writer').done") == "True"
    expected = f"('writer is pinned to its device', '{OPS}, pid {ops.pid}')"
    # The answer is written after the action.
    until(lambda: expected in ann.run("[(e.because, e.by) for e in rt.status().events]"))
    assert ops.run("rt.unpin('writer').done") == "True"


# The operator's caps


def test_a_cap_on_bytes_counts_all_processes_of_a_user(box):
    """Ann's idle model in another kernel is evicted for her second model.

    If both models are in use, the error names the cap.
    """
    box.configure(f'[users.{ANN}]\nbytes_per_device = "5 GiB"')
    one, two = box.kernel(ANN, a="3GiB"), box.kernel(ANN, b="3GiB")
    one.run("rt.preload('a')")
    assert two.run(f"rt.preload('b', timeout={PATIENCE}).where") == "'sim:0'"
    assert one.run("[l.where for l in rt.status().leases() if l.name == 'a']") == "['host']"
    two.run("held = rt.use('b')")
    two.run("model = held.__enter__()")
    two.run("rt.tick()")
    reply = one.run("rt.preload('a')")
    assert reply.startswith(
        f"NotAllowed: a needs 3.0 GiB; {ANN} may hold at most 5.0 GiB on sim:0 (cap [users.{ANN}] "
        f"bytes_per_device in {box.config}); 3.0 GiB there cannot leave now."
    ), reply


def test_a_groups_caps_apply_to_each_member(box):
    box.configure(f'[groups.{GROUP}]\nimportance = "normal"\nkeep = false')
    ann = box.kernel(ANN, a="1GiB")
    assert f"(cap [groups.{GROUP}] importance in {box.config})" in ann.run(
        "rt.use('a', importance='high').__enter__()"
    )
    assert f"{ANN} may not keep a on a device (cap [groups.{GROUP}] keep in" in ann.run(
        "rt.pin('a')"
    )
    assert ann.run("rt.preload('a').done") == "True"


def test_a_block_held_for_too_long_is_logged_and_nothing_new_is_granted(box):
    """The memory of a leased block of code is in use, so it stays. Its user gets no new lease in
    any kernel until the block of code ends.
    """
    box.configure(f'[users.{ANN}]\nlongest_lease = "1s"')
    one, two = box.kernel(ANN), box.kernel(ANN, a="1GiB")
    assert two.run("rt.preload('a').done") == "True"
    two.run("rt.evict('a')")
    one.run("held = rt.lease('1GiB', purpose='training')")
    one.run("block = held.__enter__()")
    time.sleep(1.1)
    one.run("rt.tick()")
    assert "training#1 (1.0 GiB)" in one.run(
        "[e.because for e in rt.status().events if e.action == 'overstayed']"
    )
    reply = two.run("rt.preload('a')")
    assert (
        reply.startswith("NotAllowed: ")
        and f"(cap [users.{ANN}] longest_lease in {box.config})" in reply
    )
    one.run("held.__exit__(None, None, None)")
    assert two.run(f"rt.preload('a', timeout={PATIENCE}).done") == "True"


# gpu ledger init


SYSTEMCTL = """#!/bin/sh
echo "$@" >> {root}/told
[ "$1" != enable ] || setsid $(sed -n s/^ExecStart=//p {root}/$4) >/dev/null 2>&1 &
[ ! -e {root}/broken ] || {{ echo "Unit is masked." >&2; exit 1; }}
"""


def test_where_there_is_systemd_the_keeper_is_its_service(box, monkeypatch):
    """A script stands in for `systemctl`: it runs the command of the unit."""
    box.end_service()
    until(lambda: not answers(box.ledger / boot_id()))
    script = box.root / "systemctl"
    script.write_text(SYSTEMCTL.format(root=box.root))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{box.root}:{os.environ['PATH']}")
    monkeypatch.setattr(setup, "SYSTEMD", box.root)
    monkeypatch.setattr(setup, "UNITS", box.root)
    name = f"gpu-console{str(box.ledger).replace('/', '-')}.service"
    reply = init(str(box.ledger), GROUP, str(box.config))
    assert f"systemd runs its keeper, as {name}" in reply.because
    opened = name.replace(".service", ".socket")
    assert (box.root / "told").read_text() == f"daemon-reload\nenable --now {opened} {name}\n"
    assert f"ListenStream={box.ledger}/keeper.sock\n" in (box.root / opened).read_text()
    assert {"Type=notify", "Restart=always", "FileDescriptorStoreMax=1"} <= set(
        (box.root / name).read_text().splitlines()
    )
    until(lambda: answers(box.ledger / boot_id()))
    box.end_service()
    until(lambda: not answers(box.ledger / boot_id()))
    (box.root / "broken").touch()
    with pytest.raises(GpuError, match=f"Unit is masked.*\n.*journalctl -u {name}"):
        init(str(box.ledger), GROUP, str(box.config))


def test_init_can_be_repeated(box):
    before = box.config.read_text()
    reply = init(str(box.ledger), GROUP, str(box.config))
    assert "is shared already by" in reply.because and box.config.read_text() == before
    older = before.replace("keeper://", "sqlite://")  # as version 0.2 named it
    box.config.write_text(older)
    assert init(str(box.ledger), GROUP, str(box.config)).done and box.config.read_text() == older


def test_init_adds_the_ledger_to_an_existing_configuration(users):
    root = Path(tempfile.mkdtemp(prefix="gpu-", dir="/tmp"))
    root.chmod(0o755)
    try:
        config = root / "config.toml"
        config.write_text("[users.ann]\nkeep = false\n")
        reply = init(str(root / "ledger"), GROUP, str(config))
        assert "its keeper runs as pid" in reply.because
        assert (
            config.read_text()
            == f'ledger = "keeper://{root}/ledger"\n\n[users.ann]\nkeep = false\n'
        )
        with pytest.raises(GpuError, match="names another ledger already"):
            init(str(root / "other"), GROUP, str(config))
        assert not (root / "other").exists()
        os.kill(int(re.search(r"pid (\d+)", reply.because)[1]), signal.SIGTERM)
    finally:
        shutil.rmtree(root)


def test_init_refuses_unsuitable_places(box, monkeypatch):
    """In unsuitable places the command creates no file or directory."""
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
    monkeypatch.setattr(setup, "file_system_of", lambda path: "nfs4")
    with pytest.raises(BadSetting, match="network file system .nfs4."):
        init(str(root / "new"), GROUP, str(root / "other.toml"))
    assert not (root / "new").exists() and not (root / "other.toml").exists()


def test_init_requires_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotAllowed, match="As root:  gpu ledger init --group gpu /srv/ledger"):
        init("/srv/ledger", "gpu", "/etc/gpu-console/config.toml")
