""" "Run All" in real kernels. The extension sees the cells that wait, and their models are loaded ahead."""

import contextlib
import importlib.util
import json
import os
import re
import sys

import nbformat
import pytest

from tests.clock import PATIENCE, finished, until

from . import notebooks
from .notebooks import Notebook

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
LOOK = "print('seen', [(c.cell, c.uses, c.running) for c in upcoming.cells(['a', 'b', 'c'], lambda v: '')])"


@contextlib.contextmanager
def running_kernel(arguments=(), stderr=None, notebook=""):
    """A kernel on a simulated card, with a ledger of its own, and the client of that kernel."""
    settings = {"GPU_DEVICES": "sim:24GiB,host:64GiB", "JPY_SESSION_NAME": notebook}
    options = {"extra_arguments": list(arguments), "stderr": stderr}
    with Notebook("", "memory:", loads=False, options=options, **settings) as one:
        yield one.manager, one.client


@pytest.fixture
def kernel():
    """A kernel without the extension."""
    with running_kernel() as (manager, client):
        run_all(client, ["from gpu_runtime.notebook import upcoming\nimport time"])
        yield manager, client


def send(client, codes):
    """Sends all cells at once, as Run All in JupyterLab does. Returns the message ids."""
    ids = []
    for number, code in enumerate(codes):
        content = {"code": code, "silent": False, "user_expressions": {}}
        message = client.session.msg("execute_request", content, metadata={"cellId": f"id{number}"})
        client.shell_channel.send(message)
        ids.append(message["header"]["msg_id"])
    return ids


def results(client, ids):
    """The status and the printed text of each cell, once all of them have ended."""
    replies: dict[str, str] = {}
    printed = dict.fromkeys(ids, "")
    idle: set[str] = set()
    while idle < set(ids):
        message = client.get_iopub_msg(timeout=PATIENCE)
        parent, content = message["parent_header"].get("msg_id"), message["content"]
        if parent in printed and message["msg_type"] == "stream":
            printed[parent] += content["text"]
        elif parent in printed and message["msg_type"] == "error":
            printed[parent] += f"{content['ename']}: {content['evalue']}"
        elif parent in printed and content.get("execution_state") == "idle":
            idle.add(parent)
    while not replies.keys() >= set(ids):
        reply = client.get_shell_msg(timeout=PATIENCE)
        replies[reply["parent_header"].get("msg_id")] = reply["content"].get("status", "")
    return [(replies[id], printed[id]) for id in ids]


def run_all(client, codes):
    return results(client, send(client, codes))


def awaited(cells):
    """Code that waits until the kernel knows so many `cells`, the running one included."""
    known = "len(upcoming.cells(['a'], lambda v: ''))"
    return (
        "import time; from gpu_runtime.notebook import upcoming\n"
        f"until = time.monotonic() + {PATIENCE}\n"
        f"while {known} < {cells} and time.monotonic() < until: time.sleep(0.02)\n"
    )


def seen(text):
    """The list of cells that the code `LOOK` printed."""
    return eval(re.search(r"seen (.*)", text)[1])


def looked(client):
    """The list of cells that a later cell sees. For a moment after a failed cell, a kernel aborts cells."""
    return seen(until(lambda: run_all(client, [LOOK])[0][1]))


def test_a_running_cell_sees_the_cells_that_wait_and_their_models(kernel):
    """JupyterLab sends all cells at once. None of them is lost, and they run in their order."""
    _, client = kernel
    run_all(client, ["%load_ext gpu", "order = []"])
    cells = [
        f"{awaited(5)}{LOOK}; order.append(1)",
        "order.append(2)",
        "def later(): return rt.use('b')\norder.append(3)",
        "order.append(4)\nif False: later(); rt.preload('c')",
        f"{LOOK}; print(order)",
    ]
    found = run_all(client, cells)
    assert [status for status, _ in found] == ["ok"] * 5
    first, last = seen(found[0][1]), seen(found[4][1])
    assert [uses for _, uses, _ in first] == [(), (), (), ("b", "c"), ()]
    assert [running for _, _, running in first] == [True, False, False, False, False]
    [(_, number)] = run_all(client, ["print(len(In) - 1)"])
    number = int(number) - len(cells)
    assert [cell for cell, _, _ in first] == [f"cell {number + i}" for i in range(5)]
    assert len(last) == 1 and "[1, 2, 3, 4]" in found[4][1]


def test_a_kernel_that_starts_with_the_extension_loses_no_message(tmp_path):
    """A kernel may load the extension when it starts, before it reads its sockets. `gpu autoload` arranges that."""
    log = tmp_path / "log"
    with log.open("w") as stderr, running_kernel(["--IPKernelApp.extensions=gpu"], stderr) as found:
        _, client = found
        known = "from gpu_runtime.notebook import upcoming"
        first = [known, f"{awaited(2)}{LOOK}", "rt.use('b')"]
        printed = run_all(client, first)[1][1]
    assert [uses for _, uses, _ in seen(printed)] == [(), ("b",)]
    assert "Invalid message" not in log.read_text()


def test_an_error_and_an_interrupt_empty_the_schedule(kernel):
    manager, client = kernel
    run_all(client, ["%load_ext gpu"])
    failed = run_all(client, [awaited(4), "1/0", "print('not run')", "rt.use('a')"])
    assert [status for status, _ in failed] == ["ok", "error", "aborted", "aborted"]
    assert len(looked(client)) == 1, "only the cell that looks"

    ids = send(client, [f"{awaited(2)}print('begun', flush=True); time.sleep(3600)", "rt.use('a')"])
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["msg_type"] == "stream" and "begun" in message["content"]["text"]:
            break
    manager.interrupt_kernel()
    assert [status for status, _ in results(client, ids)] == ["error", "aborted"]
    assert len(looked(client)) == 1


def test_three_hundred_cells_keep_their_order_and_without_the_extension_none_is_read_ahead(kernel):
    """`%unload_ext` ends that."""
    _, client = kernel
    run_all(client, ["%load_ext gpu", "seq = []"])
    found = run_all(client, [f"seq.append({n})" for n in range(300)] + ["print(seq)"])
    assert json.loads(found[-1][1]) == list(range(300))
    run_all(client, ["%unload_ext gpu"])
    found = run_all(client, [f"time.sleep(0.2); {LOOK}", "print('ran')"])
    assert seen(found[0][1]) == [] and found[1] == ("ok", "ran\n")


# -- three models, Run All, and a program that runs a notebook
def three_models(card, order):
    """A notebook that uses three models in this order; a cell waits for the next load. `story` is what happened."""
    setup = f"""
%env GPU_DEVICES=sim:{card},host:64GiB
%env GPU_PREFETCH=auto
import json, time
%load_ext gpu
story = []
def noted(name):
    return lambda what: story.append(f"{{what}} {{name}}")
for name in "abc":
    rt.register(name, noted(name), backend="fake", size="10GiB")
def loads():
    return sum(event.startswith("load") for event in story)
def used(name):
    wanted = min("abc".index(name) + 2, 3)
    with rt.use(name):
        until = time.monotonic() + {PATIENCE if card == "24GiB" else 1.3}
        while loads() < wanted and time.monotonic() < until: time.sleep(0.02)
        story.append(f"used {{name}}")
"""
    cells = [f"used({name!r})" for name in order]
    last = "found = rt.schedule()\nprint('end', json.dumps([story, found.unused]))"
    return [setup, "time.sleep(1.3)", *cells, last]


def check(printed, card):
    """What the last cell printed: each model is loaded once, before its cell if the card holds two of three."""
    story, unused = json.loads(re.search(r"end (.*)", printed)[1])
    ahead = ["load a", "load b", "used a", "load c", "used b", "used c"]
    alone = ["load a", "load b", "load c"]
    wanted = ahead if card == "24GiB" else alone
    assert [event for event in story if event in wanted] == wanted and unused == 0
    assert [event for event in story if event.startswith("load")] == alone


@pytest.mark.parametrize("card, order", [("24GiB", "abc"), ("14GiB", "aabcc")])
def test_run_all_loads_each_model_once_and_early_if_the_card_holds_two_of_three(card, order):
    """A card that holds one model evicts nothing that the next cell needs."""
    with running_kernel() as (_, client):
        setup, *cells = three_models(card, order)
        run_all(client, [setup])
        check(run_all(client, cells)[-1][1], card)


PROGRAMS = {
    "nbconvert": "--to notebook --execute in.ipynb --output out.ipynb",
    "papermill": "-k python3 --no-progress-bar in.ipynb out.ipynb",
}


@pytest.mark.parametrize(
    "program, card, order",
    [("nbconvert", "24GiB", "abc"), ("papermill", "24GiB", "abc"), ("papermill", "14GiB", "aabcc")],
)
def test_a_program_that_runs_the_notebook_cell_by_cell_is_looked_ahead_too(
    tmp_path, program, card, order
):
    """The program sends a cell only when the last one has ended. The order of the cells is in the notebook's file."""
    if importlib.util.find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    book = nbformat.v4.new_notebook(metadata=KERNEL)
    book.cells = [nbformat.v4.new_code_cell(code) for code in three_models(card, order)]
    nbformat.write(book, tmp_path / "in.ipynb")
    settings = {"GPU_LEDGER": "memory:", "PYTHONPATH": notebooks.paths(), "JPY_SESSION_NAME": ""}
    words = [sys.executable, "-m", program, *PROGRAMS[program].split()]
    done = finished(words, cwd=tmp_path, env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-2000:]
    ran = nbformat.read(tmp_path / "out.ipynb", 4)
    check(ran.cells[-1].outputs[0]["text"], card)


def test_a_run_all_that_loads_the_extension_itself_is_looked_ahead_by_the_file(tmp_path):
    """The later cells were sent before, so it reads them from the notebook's file.

    On a busy machine the next cell begins later than a person could start it, so the limit is raised.
    """
    codes = [
        "import gpu.look_ahead; gpu.look_ahead.PEOPLE_SECONDS = 3600\n"
        "%load_ext gpu\nfrom gpu_runtime.notebook import upcoming",
        f"x = 1; {LOOK}",
        "rt.use('b')",
        "1",
    ]
    path = tmp_path / "n.ipynb"
    cells = [nbformat.v4.new_code_cell(code, id=f"id{n}") for n, code in enumerate(codes)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with running_kernel(notebook=str(path)) as (_, client):
        printed = run_all(client, codes)[1][1]
    assert [uses for _, uses, _ in seen(printed)] == [(), ("b",), ()]
