"""The stop button interrupts at every line of our code. Each step happens completely or not at all."""

import linecache
import sys
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn

from gpu_runtime.backends.registry import open_backend
from gpu_runtime.facts import ModelSpec, Share

CARD = (Share("sim:0", 0),)
X = torch.ones(1, 8)


def network() -> nn.Module:
    """A module whose weights need no gradients, so that no graph of an answer keeps them alive."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats its whole stack, for CUDA
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(first, last).eval().requires_grad_(False)


@cache
def lines_with_with(file: str) -> frozenset[int]:
    """The numbers of the lines of a file that begin with `with`."""
    lines = enumerate(linecache.getlines(file), 1)
    return frozenset(number for number, text in lines if text.lstrip().startswith("with "))


def _stop() -> None:
    raise KeyboardInterrupt


def interrupted_at(
    line: int, act: Callable[[], object], happen: Callable[[], object] = _stop
) -> bool:
    """Interrupts `act`, or calls `happen`, at the `line`-th line of ours but `with` lines; False if it ended before."""
    left = line

    def trace(frame, event, _):
        if not frame.f_globals.get("__name__", "").startswith("gpu_runtime"):
            return None
        skipped = lines_with_with(frame.f_code.co_filename)

        def at_line(frame, event, _):
            nonlocal left
            if event == "line" and frame.f_lineno not in skipped:
                left -= 1
                if left == 0:
                    happen()
            return at_line

        return at_line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
def test_a_load_stopped_at_any_line_frees_everything(probe, watched):
    """Every byte is free once the traceback is dropped."""
    backend, line = open_backend("torch", probe), 0
    progress = (lambda done, total: None) if watched else None

    def load():
        backend.load(ModelSpec("net", "torch"), CARD, network, progress=progress)

    load()
    while interrupted_at(line := line + 1, load):
        assert not any(probe.used().values()), f"line {line}"
    assert line > 100


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_move_stopped_at_any_line_is_complete_or_did_not_happen(probe, part):
    """After each interrupt the values, the account and the device agree, and the next move works."""
    backend, line = open_backend("torch", probe), 0
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))).eval().requires_grad_(False)
    module = layers if part else network()
    model = backend.load(ModelSpec("net", "torch"), CARD, [module].pop)
    expected, size = module(X), backend.measure(model)[0].bytes
    here = (Share("sim:0", size),)
    half = (Share("sim:0", size // 2), Share("host", size // 2))
    target = away = half if part else (Share("host", size),)
    while interrupted_at(line := line + 1, partial(backend.move, model, target)):
        there = backend.measure(model)
        assert there in (here, away), f"line {line}"
        assert torch.equal(module(X), expected), f"line {line}"
        held = {"sim:0": 0, "sim:1": 0, "host": 0}
        assert probe.used() == held | {share.device: share.bytes for share in there}, f"line {line}"
        if there == target:
            target = here if target is away else away
    assert line > 100
    backend.drop(model)
    del module, layers
    assert not any(probe.used().values())


def test_a_drop_stopped_at_any_line_is_complete_or_did_not_happen(probe):
    backend, line = open_backend("torch", probe), 0
    model = None

    def drop():
        backend.drop(model)

    while True:
        model = backend.load(ModelSpec("net", "torch"), CARD, network)
        if not interrupted_at(line := line + 1, drop):
            break
        held = sum(probe.used().values())
        assert held == sum(share.bytes for share in backend.measure(model)), f"line {line}"
        backend.drop(model)
        assert not any(probe.used().values())
    assert line > 20
