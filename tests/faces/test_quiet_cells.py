"""Which cells run while the notebook's memory is parked. A cell that could reach an object of the
user's is never among them.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
from gpu import quiet_cells
from gpu.magics import GpuMagics
from gpu.parking import Parking
from IPython.core.events import EventManager, available_events

from gpu_runtime import verbs


@pytest.fixture
def shell():
    """A shell that has our magic, and no hooks of the user's."""
    magics = {"gpu": GpuMagics.gpu, "gpuctl": GpuMagics.gpu}
    shell = SimpleNamespace(ast_transformers=[], find_line_magic=magics.get)
    shell.events = EventManager(shell, available_events)
    return shell


def touches_nothing(shell, code, **content):
    return quiet_cells.touches_nothing(shell, {"code": code, **content})


@pytest.mark.parametrize(
    "code",
    [
        "%gpu",
        "%gpu status --all;",
        "# who holds it?\n%gpu leases\n\n  %gpuctl why kernel",
        "%gpu plan 14 GiB",
        "%gpu --json",
        "%gpu park",  # it is parked already
        "%gpu park train.ipynb",
        "1+1",
        "(1.5, 'a') == [2, None]",
        "not True or -3 < 4  # quick",
        "# a note",
    ],
)
def test_reading_verbs_and_constants_touch_nothing(shell, code):
    assert touches_nothing(shell, code)


@pytest.mark.parametrize(
    "code",
    [
        "x",
        "1+x",
        "print(1)",
        "import torch",
        "f'{x}'",
        "%gpu\nx.sum()",
        "(5\n%gpu\n)",  # the rest of a division by a variable
        "%gpu why {name}",
        "%gpu why $name",
        "%gpu why x?",
        "%gpu who \\\n--json",
        "%gpu models -o df",
        "%gpu models --output=df",
        "df = %gpu models",
        "%gpu why 'open",
        "%gpu free",
        "%gpu preload qwen",
        "%gpu unpark",
        "%gpu park never",
        "%%gpu status",
        "%time 1",
        "lambda: 1",
        "[1 for _ in 'ab']",
        "9 if 1 else x",
        "1+",
    ],
)
def test_every_other_cell_gets_its_memory_first(shell, code):
    assert not touches_nothing(shell, code)


def test_expressions_and_hooks_of_the_user_get_the_memory_first(shell):
    """A front end may send expressions with a cell. A hook runs beside every cell."""
    assert not touches_nothing(shell, "1", user_expressions={"a": "x"})
    shell.events.register("post_run_cell", lambda: None)
    assert not touches_nothing(shell, "1")


def test_a_users_change_of_the_syntax_tree_gets_the_memory_first(shell):
    shell.ast_transformers.append(type("Mine", (ast.NodeTransformer,), {"__module__": "mine"})())
    assert not touches_nothing(shell, "1")


def test_a_magic_of_another_package_is_not_ours(shell):
    shell.find_line_magic = {"gpu": ast.parse}.get
    assert not touches_nothing(shell, "%gpu")
    assert not touches_nothing(shell, "%gpuctl")


def test_the_hooks_of_this_extension_are_no_hooks_of_the_user(shell):
    kernel = SimpleNamespace(pre_handler_hook=None, post_handler_hook=None, control_handlers={})
    shell.kernel = kernel
    parking = Parking(shell, lambda: None, print)
    assert touches_nothing(shell, "1")
    parking.remove()


def test_the_reading_verbs_are_verbs_of_a_notebook():
    assert {name for name in quiet_cells.READS} <= {one.name for one in verbs.verbs("%gpu")}
