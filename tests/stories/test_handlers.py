"""A signal handler and an exit function of the user run with the memory of their notebook, which was parked."""

import os
import signal

import pytest

from gpu_runtime import Runtime
from tests.clock import until
from tests.owner.test_settings_effects import proves

from .notebooks import DEVICES, Notebook, park

PREPARED = """
import atexit, os, signal, torch
from gpu import magics
[loaded] = magics._loaded.values()
x = torch.ones(5_000_000)
def save(name):
    x.add_(1)
    away = loaded.parking._bytes_are_away()
    open(name, "a").write(f"{away} {float(x.sum())}\\n")
def handler(number, frame):
    save(SIGNALLED)
before = signal.signal(signal.SIGUSR1, handler)
_ = atexit.register(save, ENDED)
"""


@pytest.fixture
def one(keeper):
    with Notebook("one.ipynb", keeper) as notebook:
        yield notebook


@pytest.fixture
def rt(keeper, one):
    with Runtime(devices=DEVICES, ledger=keeper, monitor=False) as rt:
        yield rt


@proves("gpu_return_at_exit")
def test_a_signal_handler_and_an_exit_function_run_with_the_memory(one, rt, tmp_path):
    """They ran while the memory was away: on a card the checkpoint raised, and what it wrote was lost."""
    signalled, ended = tmp_path / "signalled", tmp_path / "ended"
    one.run(f"SIGNALLED, ENDED = {str(signalled)!r}, {str(ended)!r}\n{PREPARED}")
    as_before = "print(signal.getsignal(signal.SIGUSR1) is handler, float(x.sum()))"
    park(rt)
    os.kill(one.pid, signal.SIGUSR1)
    until(signalled.exists)
    assert "True 10000000.0" in one.run(as_before)
    park(rt)
    assert "True 10000000.0" in one.run(as_before)
    park(rt)
    one.client.shutdown()
    until(lambda: ended.exists() and ended.read_text().endswith("\n"))
    assert signalled.read_text() == "False 10000000.0\n"
    assert ended.read_text() == "False 15000000.0\n"


CUSTOM = {
    "an input transformer": (
        "def seen(lines):\n    note('transformer')\n    return lines\n"
        "ip.input_transformers_post.append(seen)",
        "ip.input_transformers_post.remove(seen)",
    ),
    "a formatter": (
        "plain = ip.display_formatter.formatters['text/plain']\n"
        "_ = plain.for_type(int, lambda value, p, cycle: note('formatter') or p.text(str(value)))",
        "_ = plain.pop(int)",
    ),
    "an observer": (
        "def seen(change): note('observer')\nip.observe(seen, 'execution_count')",
        "ip.unobserve(seen, 'execution_count')",
    ),
}


def test_what_ipython_calls_with_a_cell_has_the_memory(one, rt):
    """IPython transforms the text of a cell before its first hook, and shows a constant in a parked notebook."""
    one.run(
        "import torch; x = torch.ones(5_000_000); from gpu import magics; story = []\n"
        "[loaded] = magics._loaded.values(); ip = get_ipython()\n"
        "def note(what): story.append((what, loaded.parking._bytes_are_away()))"
    )
    for name, (begin, end) in CUSTOM.items():
        one.run(begin)
        park(rt)
        one.run("story.clear()")
        park(rt)
        one.run("1 + 1")
        shown = one.run("print(bool(story), any(away for _, away in story), story)")
        assert shown.startswith("True False"), (name, shown)
        one.run(end)
