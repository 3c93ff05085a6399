"""`gpu status --watch`: a live view in a terminal, with problems on top and the largest holder first."""

import re

import pytest
from msgspec.structs import replace

from gpu_runtime import GpuError, cli
from gpu_runtime.rendering import text

from . import samples
from .test_waiting import Terminal

COLOUR = re.compile(r"\x1b\[[\d;]*m")


def shown(snapshot, width=200, height=60):
    return [COLOUR.sub("", line) for line in text.screen(snapshot, width, height, "12:00:00")]


def test_problems_are_on_top_in_red_then_requests_that_wait_then_the_largest_holder():
    """A fault of the monitor needs a person. A request that waits may need one."""
    troubled = replace(samples.waiting, degraded="nvidia-smi hangs")
    lines = text.screen(troubled, 200, 60, "12:00:00")
    assert lines[1].startswith("\x1b[31;1m! The monitor cannot see: nvidia-smi hangs")
    assert " waits " in lines[2] and lines[2].startswith("\x1b[33m!")
    assert not [line for line in shown(samples.empty) if line.startswith("!")]
    lines = shown(samples.busy)
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("MODEL")) + 1 :]
    assert [line.split()[0] for line in table] == ["qwen", "llama", "reranker"]


@pytest.mark.parametrize("name", ["busy", "waiting", "eight", "overdraft", "hostile", "empty"])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (60, 10), (1, 3)])
def test_a_screen_never_exceeds_the_terminal(name, width, height):
    lines = shown(getattr(samples, name), width, height)
    assert len(lines) <= height and all(len(line) <= max(width, 20) for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_view_is_drawn_until_ctrl_c_and_the_terminal_is_restored(rt, capsys):
    terminal, waits = Terminal(), []

    def wait(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    cli.watch(rt, terminal, wait)
    text = "".join(terminal)
    assert text.startswith("\x1b[?1049h") and text.endswith("\x1b[?25h\x1b[?1049l")
    assert text.count("1 simulated GPU") == 3 and waits == [1.0, 1.0, 1.0]
    with pytest.raises(GpuError, match="needs a terminal"):
        cli.watch(rt)
