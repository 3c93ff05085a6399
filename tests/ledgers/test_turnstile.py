"""The line before the book: it helps those who wait in it, and nobody depends on whoever is inside."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpu_runtime.ledgers.turnstile import STALLED_SECONDS, Turnstile, turnstile_in

from .conftest import REPO

INSIDE = """
import sys; from pathlib import Path; from gpu_runtime.ledgers.turnstile import turnstile_in
turnstile = turnstile_in(Path(sys.argv[1]))
for line in sys.stdin:
    print(turnstile.try_enter() if line == "enter\\n" else turnstile.leave(), flush=True)
"""


class Other:
    """Another process at the same turnstile."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", INSIDE, directory], cwd=REPO, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=os.environ | {"PYTHONPATH": str(REPO)})

    def say(self, word: str) -> str:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def other(tmp_path):
    one = Other(tmp_path)
    yield one
    one.process.kill()
    one.process.wait(10)
    one.process.stdin.close()
    one.process.stdout.close()


@pytest.fixture
def ours(tmp_path) -> Turnstile:
    return turnstile_in(tmp_path)


def test_one_process_is_inside_at_a_time(ours, other):
    assert other.say("enter") == "True"
    assert not ours.try_enter()
    other.say("leave")
    assert ours.try_enter()
    assert other.say("enter") == "False"


def test_whoever_waits_is_woken_when_the_one_inside_leaves(ours, other, monkeypatch):
    monkeypatch.setattr("gpu_runtime.ledgers.turnstile.STALLED_SECONDS", 30.0)
    other.say("enter")
    leaving = threading.Timer(0.05, other.say, ["leave"])
    leaving.start()
    began = time.monotonic()
    assert ours.enter()
    assert time.monotonic() - began < 15
    leaving.join()


@pytest.mark.parametrize("how", ["stopped", "thinking"])
def test_whoever_does_not_come_out_is_walked_past(ours, other, how):
    """It may be stopped, or wait for a GIL that another of its threads keeps: the book does not need its leave."""
    other.say("enter")
    if how == "stopped":
        other.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert not ours.enter()
    assert time.monotonic() - began >= STALLED_SECONDS
    began = time.monotonic()
    assert not any(ours.enter() for _ in range(100))
    assert time.monotonic() - began < 100 * STALLED_SECONDS, "and nobody waits for the same one twice"
    if how == "thinking":
        other.say("leave")
        assert ours.try_enter(), "the line is in order again"


def test_death_lets_go(ours, other):
    other.say("enter")
    other.process.kill()
    other.process.wait(10)
    assert ours.try_enter()


def test_where_there_can_be_none_all_push(tmp_path):
    """A full or read-only disk keeps nobody from the book."""
    (tmp_path / "turn.pipe").mkdir()
    assert turnstile_in(tmp_path) is None
    assert turnstile_in(tmp_path / "missing") is None


def test_what_a_member_puts_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "turn").symlink_to(tmp_path / "precious")
    assert turnstile_in(tmp_path) is None
    assert (tmp_path / "precious").read_text() == "mine"
