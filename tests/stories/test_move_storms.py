"""Interrupts and kills in the middle of moves of parts and shadows, at random lines of our code.

python -m tests.stories.test_move_storms MODEL INTERRUPTS KILLS SECONDS
"""

import gc
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpu_runtime.backends.pytorch import shadows, torch_model
from gpu_runtime.backends.pytorch.transformers_backend import TransformersBackend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.devices.process_memory import held_by
from gpu_runtime.facts import HOST, ModelSpec, Share
from tests import soak, tiny_models
from tests.backends.test_interrupts import interrupted_at

from .kernels import counted

CARD, SEED = "sim:0", 1
MOST_LINES = 5500  # of a move of the small model, with its digests


class Kernel:
    """A model from disk on a simulated card, with its shadow in pages that others can share."""

    def __init__(self, place: str, seed: int, copies: tuple[int, ...] = ()) -> None:
        self.random = random.Random(seed)
        self.probe = open_probe("sim:64MiB,host:64MiB")
        self.backend = TransformersBackend(self.probe)
        self.place = place
        self.model = self.load(copies)
        self.size = sum(share.bytes for share in self.backend.measure(self.model))
        self.weights = self.content()

    def load(self, copies: tuple[int, ...]) -> Any:
        spec = ModelSpec("model", "transformers", source=self.place)
        return self.backend.load(spec, (Share(CARD, 0),), shadow=True, copies=copies)

    def content(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.module.state_dict().items()}

    def act(self) -> Callable[[], object]:
        """A random move: all of the model, a part of it, back, or its shadow is freed."""
        away = (Share(HOST, self.size),)
        part = self.random.randrange(self.size // 4, self.size)
        shares = {
            "away": away,
            "part": (Share(CARD, self.size - part), Share(HOST, part)),
            "back": (Share(CARD, self.size),),
        }
        kind = self.random.choice(["away", "part", "back", "back", "free"])
        if kind == "free":
            return lambda: self.backend.free_shadow(self.model)
        return lambda: self._move(shares[kind], kind == "back")

    def _move(self, shares: tuple[Share, ...], shadow: bool) -> None:
        try:
            self.backend.move(self.model, shares, shadow=shadow)
        except Exception as error:  # a model in host memory has no part that can leave
            assert type(error).__name__ == "CannotGovern", error

    def is_whole(self) -> bool:
        """Whether each weight has its value, and each byte is counted where it is."""
        now = self.model.module.state_dict()
        same = all(torch.equal(now[name], tensor) for name, tensor in self.weights.items())
        there = {share.device: share.bytes for share in self.backend.measure(self.model)}
        held = {id: self.probe.place(id).held_bytes() for id in (CARD, HOST)}
        host = there.get(HOST, 0) + self.model.shadow_bytes
        return same and held == {CARD: there.get(CARD, 0), HOST: host}


def interrupts(place: str, count: int, seed: int, until: float) -> int:
    """The number of interrupts that were made, at most `count`. Fails at the first loss."""
    kernel, done = Kernel(place, seed), 0
    while done < count and time.monotonic() < until:
        if interrupted_at(kernel.random.randrange(1, MOST_LINES), kernel.act()):
            done += 1
            assert kernel.is_whole(), f"interrupt {done} of seed {seed}"
    kernel.backend.drop(kernel.model)
    return done


def kills(place: str, count: int, seed: int, until: float) -> int:
    """Processes killed, at most `count`, at random lines of a move with shared or own pages; fails at a loss."""
    kernel, done = Kernel(place, seed, (os.getpid(),)), 0
    pages = {found.inode for found in held_by([os.getpid()])}
    while done < count and time.monotonic() < until:
        line = kernel.random.randrange(1, MOST_LINES)
        child = os.fork()
        if not child:
            _end_at(kernel, line, seed + done)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
        assert not list(held_by([child]))
        done += 1
        if done % 50 == 0 or done == count:
            assert kernel.is_whole(), f"kill {done} of seed {seed}"
            assert {found.inode for found in held_by([os.getpid()])} == pages
    return done


def _end_at(kernel: Kernel, line: int, seed: int) -> None:
    """Moves the model of this forked process, which is killed at that line or after a few moves."""
    kernel.random = random.Random(seed)
    loads = [lambda: kernel.load((os.getppid(),))] if seed % 8 == 0 else []
    for act in (*loads, *(kernel.act() for _ in range(3))):
        interrupted_at(line, act, lambda: os.kill(os.getpid(), signal.SIGKILL))
    os.kill(os.getpid(), signal.SIGKILL)


def test_interrupts_and_kills_in_the_middle_of_moves_lose_nothing(tmp_path):
    place = tiny_models.causal_lm(tmp_path / "model")
    assert counted("test_move_storms", place, 40, 12, 600) == {"interrupts": 40, "kills": 12}


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_long_storm_in_the_middle_of_moves_loses_nothing(tmp_path):
    place = tiny_models.causal_lm(tmp_path / "model")
    done = counted("test_move_storms", place, 10_000, 10_000, 3000)
    soak.add("none", interrupts_of_moves=done["interrupts"], kills_in_moves=done["kills"])


def main(place: str, *numbers: str) -> None:
    """Each of the two storms ends after its count, or after that many seconds."""
    torch.set_num_threads(1)  # a forked process has one thread
    shadows.LEAST_BYTES = 1
    torch_model.LEAST_BYTES_IN_PARTS = 1
    gc.collect()
    *counts, seconds = map(int, numbers)
    done = {}
    for attack, count in zip((interrupts, kills), counts, strict=True):
        done[attack.__name__] = attack(place, count, SEED, time.monotonic() + seconds)
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
