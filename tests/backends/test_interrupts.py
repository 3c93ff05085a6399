"""The stop button, at every line of ours: a step has happened or it has not."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from gpu_runtime.backends.registry import open_backend
from gpu_runtime.facts import ModelSpec, Share

CARD, HOST = (Share("sim:0", 0),), (Share("host", 0),)
X = torch.ones(1, 8)


def network() -> nn.Module:
    """Without gradients: an answer's graph would hold on to the weights it was made with."""
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return nn.Sequential(first, last).eval().requires_grad_(False)


def interrupted_at(line: int, act: Callable[[], object]) -> bool:
    """Acts, with a KeyboardInterrupt before that many lines of gpu_runtime have run; False where it ended sooner.

    Lines that begin with `with` are passed over: tracing stops there again on the way out, where the interpreter itself
    looks at no signal before it has called the lock's own `__exit__`.
    """
    left = line

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_globals.get("__name__", "").startswith("gpu_runtime"):
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and not text.startswith("with "):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

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
def test_a_load_leaves_nothing_at_whatever_line_it_is_stopped(probe, watched):
    """Every byte comes back once the traceback is gone; nothing is left for good."""
    backend, line = open_backend("torch", probe), 0
    progress = (lambda done, total: None) if watched else None

    def load():
        backend.load(ModelSpec("net", "torch"), CARD, network, progress=progress)

    load()
    while interrupted_at(line := line + 1, load):
        assert not any(probe.used().values()), f"line {line}"
    assert line > 100


def test_a_move_has_happened_or_has_not_at_whatever_line_it_is_stopped(probe):
    """Values, account and place agree, and the next move works."""
    backend, line = open_backend("torch", probe), 0
    model = backend.load(ModelSpec("net", "torch"), CARD, network)
    module = backend.value(model)
    expected, size = module(X), backend.measure(model)[0].bytes
    target = HOST
    while interrupted_at(line := line + 1, partial(backend.move, model, target)):
        (share,) = backend.measure(model)
        assert torch.equal(module(X), expected), f"line {line}"
        assert share.bytes == size
        assert probe.used() == {"sim:0": 0, "sim:1": 0, "host": 0} | {share.device: size}, (
            f"line {line}"
        )
        if share.device == target[0].device:
            target = CARD if target is HOST else HOST
    assert line > 100
    backend.drop(model)
    assert not any(probe.used().values())


def test_a_drop_has_happened_or_has_not_at_whatever_line_it_is_stopped(probe):
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
