"""A Redis that a day can kill, slow down and rob of its last writes, and an owner's ends of it.

The product's scripts run in fakeredis, whose clock is that of the day. Owners' files and their locks are real files.
Not simulated: forks beside a Redis, group ledgers, a directory that is deleted, several hosts.
"""

import copy
import os
import shutil
import tempfile
from collections import deque
from types import SimpleNamespace
from typing import Any

import fakeredis
from msgspec.structs import replace
from redis.exceptions import ConnectionError, TimeoutError

from gpu_runtime.ledgers import liveness, notify
from gpu_runtime.ledgers.liveness import Life, Sight, describe_self
from gpu_runtime.ledgers.redis import connection, ledger, page
from gpu_runtime.owner import lifetime

from .machine import Machine

SAVED_SECONDS = 1.0  # so much of the newest writes a Redis loses that ends (appendfsync everysec)
INFO = b"aof_enabled:1\r\nmaxmemory_policy:noeviction\r\n"


class Server:
    """A Redis, and what it has on its disk."""

    active: "Server"

    def __init__(self, box: Any) -> None:
        self.box, self.machine = box, box.machine
        self.fake = fakeredis.FakeServer(server_type="redis", version=(7,))
        self.life, self.is_up, self.slow = 0, True, 0.0
        self.bells: dict[str, Bell] = {}
        self.owners = tempfile.mkdtemp(prefix="gpu-simulation-", dir="/dev/shm")
        self.url = f"redis://simulated:6379/0?owners={self.owners}"
        self.book: page.Page | None = None  # the newest page that was written
        self._saved: deque[tuple[float, Any]] = deque()
        self._made: set[str] = set()  # the generations of pages
        Server.active = self
        self.process = box.process("the Redis")
        self.machine.start(self._wait, (), self.process, "wait")
        random = self.machine.random
        chance = SimpleNamespace(
            randbelow=random.randrange,
            token_hex=lambda size: random.randbytes(size).hex(),
            uniform=random.uniform,
        )
        ledger.secrets = page.secrets = liveness.secrets = ledger._chance = chance
        ledger.RedisConnection, ledger.Doorbell = Connection, Bell  # type: ignore[misc,assignment]
        ledger.describe_self = _described
        page.sleep = lambda seconds: self.machine.pause(None, seconds)
        lifetime.open_ledger = Ledger
        lifetime.journals_in = lambda state: ()  # type: ignore[assignment,return-value]
        lifetime.record_in = lifetime.measurements_in = lambda *_: None  # type: ignore[assignment,return-value]
        lifetime.Sampling = lambda *_, **__: None  # type: ignore[assignment,misc]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        """Removes the owners' files."""
        shutil.rmtree(self.owners, ignore_errors=True)

    def _wait(self) -> None:
        """A thread that is there when no owner is any more."""
        while True:
            self.machine.pause(None, 60.0)

    def run(self, *words: Any) -> Any:
        """The answer to a command, during which nothing else happens. Raises RedisError."""
        if words[0] == "INFO":
            return INFO
        current, self.machine.current = self.machine.current, None
        try:
            client = fakeredis.FakeStrictRedis(server=self.fake, protocol=2)
            opened = client.connection_pool.get_connection()
            opened.send_command(*words)
            return opened.read_response()
        finally:
            self.machine.current = current
            if words[0] in ("EVAL", "EVALSHA"):
                self._look()

    def _look(self) -> None:
        """Notes the page, and what is saved of all."""
        now, known = self.machine.now, self.book
        for key in self.run("KEYS", f"{connection.PAGE}*"):
            found, rev = self.run("HMGET", key, "generation", "rev")
            name, same = found.decode(), known if known and known.name == found.decode() else None
            is_old = (
                name in self._made if same is None else int(rev) <= same.rev
            )  # a copy that came back
            if not is_old:
                self._made.add(name)
                body = self.run("HGET", key, "body")
                self.book = page.page_in(name, body, int(rev), same)
                self._saved.append((now, self._copy()))
        while len(self._saved) > 1 and self._saved[1][0] <= now - SAVED_SECONDS:
            self._saved.popleft()

    def _copy(self) -> Any:
        return copy.deepcopy(self.fake.dbs, {id(self.fake.lock): self.fake.lock})

    def die(self) -> None:
        """It ends, and is started again a moment later: with all, without the last second, or empty."""
        random = self.machine.random
        what = random.choice(("whole", "whole", "older", "older", "empty"))
        self.is_up, self.life = False, self.life + 1
        self.box.note(f"the Redis ends; it will be {what}")
        self.box.troubled_until = self.machine.now + 30.0
        self.machine.pause(None, random.choice((0.01, 0.3, 3.0, 15.0)))
        if what == "empty":
            self.fake.dbs.clear()
        elif what == "older" and self._saved:
            self.fake.dbs.clear()
            self.fake.dbs.update(self._saved[0][1])
        self.fake.script_cache.clear()
        self._saved.clear()
        self.is_up = True
        self.box.note("the Redis answers again")

    def killed(self, pid: int) -> None:
        """The system closes the files of a process, and with them the locks."""
        for file in list(liveness._open_files):
            if file.owner.pid == pid:
                file.close_here()
        self.bells = {id: bell for id, bell in self.bells.items() if not id.startswith(f"{pid}.")}


def _described(**words: str) -> Any:
    assert Machine.active is not None and Machine.active.current is not None
    process = Machine.active.current.process
    return replace(describe_self(notebook=process.name, user=process.user), started=1)


class Line:
    """A connection, in place of redis-py's."""

    def __init__(self) -> None:
        self._words: tuple[Any, ...] = ()

    def send_command(self, *words: Any) -> None:
        self._words = words

    def read_response(self) -> Any:
        server, machine = Server.active, Server.active.machine
        life = server.life
        machine.pause(None, server.box.delay())
        if not server.is_up:
            raise ConnectionError("Connection refused")
        if machine.random.random() < server.slow:
            machine.pause(None, connection.ANSWER_SECONDS)
            if machine.random.random() < 0.5:
                raise TimeoutError("Timeout reading from socket")  # it was not carried out
            server.run(*self._words)
            raise TimeoutError("Timeout reading from socket")
        answer = server.run(*self._words)
        machine.pause(None, server.box.delay())
        if server.life != life:
            raise ConnectionError("Connection closed by server")
        return answer

    def disconnect(self, *_: object) -> None: ...


class Connection(connection.RedisConnection):
    """The product's connection, on such a line."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._connection = Line()


class Bell(notify.Bell):
    """A doorbell without a socket."""

    def __init__(self, directory: object, owner_id: str, group: object = None) -> None:
        super().__init__()
        self.owner_id, self.rung = owner_id, False
        Server.active.bells[owner_id] = self

    def move_to(self, directory: object) -> None: ...

    def ring_others(self, owners: Any) -> None:
        for id in owners:
            if id == self.owner_id:
                self.ring()
            elif bell := Server.active.bells.get(id):
                bell.rung = True

    def close_here(self) -> None:
        self.closed = True

    def _sleep(self, waiter: Any, seconds: float) -> bool:
        Server.active.machine.pause(lambda: waiter.woken or self.rung, seconds)
        rung, self.rung = self.rung, False
        woken, waiter.woken = waiter.woken, False
        if rung:
            self._wake_all_but(waiter)
        return rung or woken


class Ledger(ledger.RedisLedger):
    """The product's ledger. Who is stopped is known from the day."""

    def __init__(self, url: str, **words: Any) -> None:
        super().__init__(Server.active.url, **words)

    def _sight(self, owner: Any) -> Sight:
        box, life = Server.active.box, liveness.life(self._lock_file(owner.id))
        if owner.id == self.owner.id:
            return Sight.ALIVE
        if life is Life.ALIVE and box.by_id(owner.id) in box.stopped:
            return Sight.STOPPED
        return Sight(life.value)

    def give_sign(self) -> None:
        now = Server.active.machine.now
        os.utime(self._store.owner_file._fd, (now, now))
