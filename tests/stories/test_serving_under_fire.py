"""`gpu serve` while its engines are killed and strangers flood it: all are answered, nothing is left."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from tests import soak
from tests.clock import PATIENCE, until

from ..faces.served import Served
from ..impostor import NOBODY
from .kernels import ONLY_KEEPER, kind
from .serve import FAR_FUTURE, HELLO, client, gguf_models, gpu_serve, openai, told

pytest.importorskip("llama_cpp")

# The first two in workers of llama.cpp's, the third as a server with a port of its own. Two of them fit together.
MODELS = ("writer", "editor", "reader")
CALLERS = 4
ENGINES = ("llama_cpp.worker", "llama_cpp.server", "llama-server")
LEAST_SENT = 200  # requests of a flood
# A process of another user. It guesses tokens, sends requests that do not end, announces bodies
# that it does not send, and sends bytes that are no HTTP. When its input ends, it prints the number
# of its requests, which is LEAST_SENT at least.
FLOOD = """
import os, random, select, socket, sys
port, uid, least = map(int, sys.argv[1:])
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
heads = [
    b"GET /v1/models HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer wrong\\r\\n\\r\\n",
    b"GET / HTTP/1.1\\r\\n",
    b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: 99999999\\r\\n\\r\\n{",
    os.urandom(300),
]
opened, sent = [], 0
while not select.select([sys.stdin], [], [], 0.002)[0] or sent < least:
    one = socket.socket()
    one.settimeout(5)
    try:
        one.connect(("127.0.0.1", port))
        one.send(random.choice(heads))
        sent += 1
    except OSError:
        pass
    opened.append(one)
    if len(opened) > 300:
        opened.pop(random.randrange(300)).close()
print(sent)
"""


@contextmanager
def flooded(server: Served, sent: list[int]) -> Iterator[None]:
    """Another user floods the server in the `with` block. The number of requests is added to `sent`."""
    words = [sys.executable, "-c", FLOOD, str(server.port), str(NOBODY), str(LEAST_SENT)]
    flood = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
        sent.append(int(flood.communicate("\n", timeout=PATIENCE)[0]))
    finally:
        flood.kill()
        flood.communicate()


@pytest.fixture
def served(tmp_path, ledger):
    models = gguf_models(tmp_path, *MODELS)
    models["reader"]["backend"] = "llama-server"
    with gpu_serve(
        tmp_path, models, GPU_DEVICES="sim:16MiB,host:1GiB", GPU_LEDGER=ledger
    ) as server:
        yield server


class Fire:
    """Threads that call the server, and a thread that kills its engines, for a number of seconds.

    They go on until a call was answered and an engine was killed.
    """

    def __init__(self, server: Served, seconds: float) -> None:
        self.server, self.until = server, time.monotonic() + seconds
        self.ended: Counter[str] = Counter()
        self.unexpected: list[BaseException] = []
        self.kills, self.killed = 0, set()

    @property
    def goes_on(self) -> bool:
        now = time.monotonic()
        done = self.kills and self.ended["answered"]
        return now < (self.until if done else self.until + PATIENCE)

    def run(self) -> None:
        threads = [threading.Thread(target=self._call, args=(seed,)) for seed in range(CALLERS)]
        threads.append(threading.Thread(target=self._kill))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.until - time.monotonic()) + FAR_FUTURE)
        assert not any(thread.is_alive() for thread in threads), "a call never ended"

    def _call(self, seed: int) -> None:
        chance = random.Random(seed)
        # a connection that stays open would be counted as a file of the server
        with client(self.server) as talk:
            while self.goes_on:
                model, stream = chance.choice(MODELS), chance.random() < 0.5
                try:
                    self._ask(talk, model, stream=stream, leave=chance.random() < 0.1)
                except openai.APIError as error:
                    status = getattr(error, "status_code", None)
                    # None: the stream broke off and ended with an error
                    if status not in (None, 500, 502, 503):
                        self.unexpected.append(error)
                    self.ended["told why"] += 1
                    if status == 503:
                        # a breaker is open; without a pause this loop would only get refusals
                        time.sleep(0.2)
                except Exception as error:  # noqa: BLE001 - looked at by the test
                    self.unexpected.append(error)

    def _ask(self, talk: openai.OpenAI, model: str, *, stream: bool, leave: bool) -> None:
        answer = talk.chat.completions.create(
            model=model, messages=HELLO, max_tokens=40, stream=stream
        )
        if not stream:
            assert (answer.model, answer.usage.completion_tokens) == (model, 40)
            self.ended["answered"] += 1
        elif leave:
            next(iter(answer))
            answer.close()
            self.ended["left"] += 1
        else:
            assert {part.model for part in answer} == {model}
            self.ended["answered"] += 1

    def _kill(self) -> None:
        """Kills an engine if a call was answered since the last kill: otherwise every model counts as failing."""
        chance, answered = random.Random(7), -1
        while self.goes_on:
            time.sleep(chance.uniform(0.1, 1.0))
            living = engines(self.server)
            if living and self.ended["answered"] > answered:
                answered = self.ended["answered"]
                victim = chance.choice(living)
                self.killed.add(victim)
                self.kills += 1
                try:
                    os.kill(victim.pid, signal.SIGKILL)
                except ProcessLookupError:  # the process ended by itself meanwhile
                    self.kills -= 1


def engines(server: Served) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(server.process.pid).children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if any(name in word for word in words for name in ENGINES) and not any(
            "guard" in word for word in words
        ):
            found.append(child)
    return found


def put_away(server: Served) -> None:
    """Evicts all models, and checks that they leave nothing."""

    def are_away() -> bool:
        if told(server, "/memory/models"):
            told(server, "/memory/evict/llm?drop=true", "POST")
        return not told(server, "/memory/models") and not engines(server)

    until(are_away, "no model and no engine is left")


SAMPLER = "gpu_runtime.telemetry.sampler"
# How much more of each there may be afterwards.
GROWTH = {"ports": 0, "files": 4, "threads": 4, "processes": 0, "MiB": 30}


def holdings(server: Served) -> dict[str, int]:
    """The server's files, threads, processes, ports and memory without a model. The sampler is not counted."""
    process = psutil.Process(server.process.pid)
    children = process.children(recursive=True)
    family = [process, *(one for one in children if SAMPLER not in one.cmdline())]
    sockets = [one for each in family for one in each.net_connections("inet")]
    return {
        "ports": sum(one.status == psutil.CONN_LISTEN for one in sockets),
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "processes": len(family),
        "MiB": process.memory_info().rss >> 20,
    }


def opened(server: Served) -> list[str]:
    """The files behind the server's file descriptors."""
    here = Path(f"/proc/{server.process.pid}/fd")
    return sorted(os.readlink(fd) for fd in here.iterdir() if fd.is_symlink())


def under_fire(
    server: Served,
    seconds: float,
    warm_seconds: float,
    flood: Callable[[Served], AbstractContextManager[object]] = nullcontext,
) -> Fire:
    """Compares resources before and after calls and kills, but for `warm_seconds`. `flood` lasts as long."""
    Fire(server, warm_seconds).run()
    put_away(server)
    before = holdings(server)
    most = {name: before[name] + more for name, more in GROWTH.items()}
    fire = Fire(server, seconds)
    with flood(server):
        fire.run()
    put_away(server)
    with suppress(AssertionError):  # connections end, and what had them
        until(lambda: all(held <= most[name] for name, held in holdings(server).items()))
    after = holdings(server)
    assert all(after[name] <= most[name] for name in most), (before, after, opened(server))
    assert fire.unexpected == []
    assert fire.kills and fire.ended["answered"], (fire.kills, fire.ended)
    stats = told(server, "/memory/stats")
    assert (stats["allocated_mb"], stats["cpu_used_mb"], stats["models_loaded"]) == (0, 0, 0)
    assert not [victim for victim in fire.killed if victim.is_running()]
    return fire


@ONLY_KEEPER
def test_engines_are_killed_while_clients_call_and_another_user_floods_the_server(served):
    """Every lease returns; no process, port, file or thread is leaked. Without root nobody floods."""
    sent: list[int] = []
    is_root = os.geteuid() == 0
    flood = (lambda server: flooded(server, sent)) if is_root else nullcontext
    under_fire(served, 7, 3, flood=flood)
    assert not is_root or sent[0] >= LEAST_SENT


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ledger", ["keeper", "redis"], indirect=True)
def test_engines_are_killed_and_the_server_is_flooded_for_minutes(served, ledger):
    """The run is so long that a leak of a few KiB for each call would be visible."""
    seconds = 300
    sent: list[int] = []
    fire = under_fire(served, seconds, 60, flood=lambda server: flooded(server, sent))
    soak.add(
        kind(ledger),
        seconds_of_gpu_serve_under_kills_and_floods=seconds,
        engines_killed_under_calls=fire.kills,
        calls_under_fire=sum(fire.ended.values()),
        requests_of_a_flood=sent[0],
    )


@ONLY_KEEPER
def test_the_server_is_killed_and_its_engines_end_with_it(served):
    """With SIGKILL. The next server begins with an empty card."""
    talk = client(served)
    for model in ("writer", "reader"):
        talk.chat.completions.create(model=model, messages=HELLO, max_tokens=2)
    started = engines(served)
    assert len(started) >= 2
    served.process.kill()
    served.process.wait()
    _, alive = psutil.wait_procs(started, timeout=PATIENCE)
    assert alive == []
