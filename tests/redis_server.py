"""A Redis server for tests. It has its own socket and directory, which are removed with the server."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.clock import PATIENCE, until


class RedisServer:
    """A redis-server that a test can kill and start again. Each test gets a database of its own."""

    def __init__(self, *options: str) -> None:
        # A short path, because the path of a socket is limited to 107 bytes.
        self.directory = tempfile.mkdtemp(prefix="gpu-redis-")
        self.socket = f"{self.directory}/redis.sock"
        self.options = options
        self.databases = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, *options: str) -> None:
        settings = {
            "port": "0", "unixsocket": self.socket, "unixsocketperm": "700", "dir": self.directory,
            "appendonly": "yes", "save": "", "databases": "1000",
        }  # fmt: skip
        command = [word for name, value in settings.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(
            ["redis-server", *command, *self.options, *options],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(self._answers, "redis-server does not start")

    def _answers(self) -> bool:
        assert self.process.poll() is None, "redis-server has ended"
        return self.cli("PING").startswith(("PONG", "NOAUTH"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def cli(self, *words: str, database: int = 0) -> str:
        """The output of redis-cli for the command `words`."""
        return subprocess.run(
            ["redis-cli", "-s", self.socket, "-n", str(database), *words],
            text=True,
            capture_output=True,
        ).stdout.strip()

    def empty(self) -> str:
        """The URL of a database that was never used."""
        self.databases += 1
        return f"unix://{self.socket}?db={self.databases}"

    def fresh(self) -> str:
        """The URL of a database that another host uses already, so it is not empty.

        A ledger treats an empty database as one that may have lost its data.
        """
        url = self.empty()
        self.cli("HSET", "gpu-console:ledger", "schema", "1", database=self.databases)
        return url

    def end(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """Starts a server. Skips the test if redis-server is not installed."""
    if not shutil.which("redis-server"):
        pytest.skip("needs redis-server:  apt install redis-server")
    server = RedisServer(*options)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """A Redis server for all tests. Each test uses a database of its own."""
    with redis_server() as server:
        yield server
