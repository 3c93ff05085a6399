"""A Redis of the tests' own: on a socket of its own in a directory of its own, and gone with them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class RedisServer:
    """A redis-server that can be killed and started again, and as many databases as there are tests."""

    def __init__(self, *options: str) -> None:
        self.directory = tempfile.mkdtemp(
            prefix="gpu-redis-"
        )  # a short path: a socket's may have 107 bytes
        self.socket = f"{self.directory}/redis.sock"
        self.options = options
        self.databases = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *options: str) -> None:
        settings = {
            "port": "0",
            "unixsocket": self.socket,
            "unixsocketperm": "700",
            "dir": self.directory,
            "appendonly": "yes",
            "save": "",
            "databases": "1000",
        }
        command = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(
            ["redis-server", *command, *self.options, *options],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 20
        while not self.say("PING").startswith(("PONG", "NOAUTH")):
            assert self.process.poll() is None and time.monotonic() < deadline, (
                "redis-server does not start"
            )
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def say(self, *words: str, database: int = 0) -> str:
        """What redis-cli answers."""
        return subprocess.run(
            ["redis-cli", "-s", self.socket, "-n", str(database), *words],
            text=True,
            capture_output=True,
        ).stdout.strip()

    def virgin(self) -> str:
        """The URL of a database in which nobody has been."""
        self.databases += 1
        return f"unix://{self.socket}?db={self.databases}"

    def fresh(self) -> str:
        """The URL of a database that another host uses already: here it need not be feared that all was lost."""
        url = self.virgin()
        self.say("HSET", "gpu-console:ledger", "schema", "1", database=self.databases)
        return url

    def end(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A running server; skips the test where none is installed."""
    if not shutil.which("redis-server"):
        pytest.skip("needs redis-server:  apt install redis-server")
    server = RedisServer(*options)
    try:
        yield server
    finally:
        server.end()
