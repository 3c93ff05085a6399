""" "Run All" in real kernels. The extension sees the cells that wait, and their models are loaded ahead."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from tests.clock import PATIENCE, scaled

ROOT = Path(__file__).parents[2]
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
LOOK = "print('seen', [(c.cell, c.uses, c.running) for c in upcoming.cells(['a', 'b', 'c'], lambda v: '')])"


@contextlib.contextmanager
def running_kernel(arguments=(), stderr=None, notebook=""):
    """A kernel on a simulated card, with a ledger of its own, and the client of that kernel."""
    paths = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", "")))
    )
    settings = {"GPU_LEDGER": "memory:", "GPU_DEVICES": "sim:24GiB,host:64GiB"}
    manager, client = start_new_kernel(
        env={**os.environ, **settings, "PYTHONPATH": paths, "JPY_SESSION_NAME": notebook},
        extra_arguments=list(arguments),
        stderr=stderr,
    )
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel():
    """A kernel without the extension."""
    with running_kernel() as (manager, client):
        run_all(client, ["from gpu_runtime.upcoming_cells import upcoming\nimport time"])
        yield manager, client


def send(client, codes):
    """Sends all cells at once, as Run All in JupyterLab does. Returns the message ids."""
    ids = []
    for number, code in enumerate(codes):
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": True,
        }
        message = client.session.msg("execute_request", content, metadata={"cellId": f"id{number}"})
        client.shell_channel.send(message)
        ids.append(message["header"]["msg_id"])
    return ids


def results(client, ids, seconds=PATIENCE):
    """The status and the printed text of each cell, once all of them have ended."""
    replies: dict[str, str] = {}
    printed = dict.fromkeys(ids, "")
    idle: set[str] = set()
    while idle < set(ids):
        message = client.get_iopub_msg(timeout=seconds)
        parent, content = message["parent_header"].get("msg_id"), message["content"]
        if parent in printed and message["msg_type"] == "stream":
            printed[parent] += content["text"]
        elif parent in printed and message["msg_type"] == "error":
            printed[parent] += f"{content['ename']}: {content['evalue']}"
        elif parent in printed and content.get("execution_state") == "idle":
            idle.add(parent)
    while not replies.keys() >= set(ids):
        reply = client.get_shell_msg(timeout=seconds)
        replies[reply["parent_header"].get("msg_id")] = reply["content"].get("status", "")
    return [(replies[id], printed[id]) for id in ids]


def run_all(client, codes):
    return results(client, send(client, codes))


def awaited(cells):
    """Code that waits until the kernel knows so many `cells`, the running one included."""
    known = "len(upcoming.cells(['a'], lambda v: ''))"
    return (
        "import time; from gpu_runtime.upcoming_cells import upcoming\n"
        f"until = time.monotonic() + {PATIENCE}\n"
        f"while {known} < {cells} and time.monotonic() < until: time.sleep(0.02)\n"
    )


def seen(text):
    """The list of cells that the code `LOOK` printed."""
    return eval(re.search(r"seen (.*)", text)[1])


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
        known = "from gpu_runtime.upcoming_cells import upcoming"
        first = [known, f"{awaited(2)}{LOOK}", "rt.use('b')"]
        printed = run_all(client, first)[1][1]
    assert [uses for _, uses, _ in seen(printed)] == [(), ("b",)]
    assert "Invalid message" not in log.read_text()


def test_an_error_and_an_interrupt_empty_the_schedule(kernel):
    manager, client = kernel
    run_all(client, ["%load_ext gpu"])
    failed = run_all(client, [awaited(4), "1/0", "print('not run')", "rt.use('a')"])
    assert [status for status, _ in failed] == ["ok", "error", "aborted", "aborted"]
    [(_, after)] = run_all(client, [LOOK])
    assert len(seen(after)) == 1, "only the cell that looks"

    ids = send(client, ["print('begun', flush=True); time.sleep(30)", "rt.use('a')"])
    while True:
        message = client.get_iopub_msg(timeout=PATIENCE)
        if message["msg_type"] == "stream" and "begun" in message["content"]["text"]:
            break
    manager.interrupt_kernel()
    assert [status for status, _ in results(client, ids)] == ["error", "aborted"]
    [(_, after)] = run_all(client, [LOOK])
    assert len(seen(after)) == 1


def test_three_hundred_cells_keep_their_order(kernel):
    _, client = kernel
    run_all(client, ["%load_ext gpu", "seq = []"])
    found = run_all(client, [f"seq.append({n})" for n in range(300)] + ["print(seq)"])
    assert json.loads(found[-1][1]) == list(range(300))


def test_without_the_extension_the_kernel_reads_as_before(kernel):
    """The extension reads the kernel's messages ahead. `%unload_ext` ends that."""
    _, client = kernel
    run_all(client, ["%load_ext gpu", "%unload_ext gpu"])
    found = run_all(client, [f"time.sleep(0.2); {LOOK}", "print('ran')"])
    assert seen(found[0][1]) == [] and found[1] == ("ok", "ran\n")


# -- three models, Run All, and a program that runs a notebook
def three_models(card, order, mode="auto"):
    """A notebook that uses three models in this order; a cell waits for the next load. `story` is what happened."""
    setup = f"""
%env GPU_DEVICES=sim:{card},host:64GiB
%env GPU_PREFETCH={mode}
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


def outcome(printed):
    """Reads what the last cell printed: the story, and the number of unused guesses."""
    return json.loads(re.search(r"end (.*)", printed)[1])


def loads(story):
    return [event for event in story if event.startswith("load")]


LOADED_AHEAD = ["load a", "load b", "used a", "load c", "used b", "used c"]


def test_run_all_loads_each_model_during_the_cell_before_if_the_card_holds_two_of_three():
    with running_kernel() as (_, client):
        setup, *cells = three_models("24GiB", "abc")
        run_all(client, [setup])
        story, unused = outcome(run_all(client, cells)[-1][1])
    assert [event for event in story if event in LOADED_AHEAD] == LOADED_AHEAD and unused == 0


def test_a_card_that_holds_one_model_evicts_nothing_that_the_next_cell_needs():
    """The card holds only one model. Each model is loaded once for its cells, as without look-ahead."""
    with running_kernel() as (_, client):
        setup, *cells = three_models("14GiB", "aabcc")
        run_all(client, [setup])
        story, unused = outcome(run_all(client, cells)[-1][1])
    assert loads(story) == ["load a", "load b", "load c"] and unused == 0


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
    import nbformat

    if importlib.util.find_spec(program) is None:
        pytest.skip(f"{program} is not installed")
    book = nbformat.v4.new_notebook(metadata=KERNEL)
    book.cells = [nbformat.v4.new_code_cell(code) for code in three_models(card, order)]
    nbformat.write(book, tmp_path / "in.ipynb")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", program, *PROGRAMS[program].split()],
        cwd=tmp_path,
        env={**os.environ, "GPU_LEDGER": "memory:", "PYTHONPATH": paths, "JPY_SESSION_NAME": ""},
        timeout=scaled(120),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ran = nbformat.read(tmp_path / "out.ipynb", 4)
    story, unused = outcome(ran.cells[-1].outputs[0]["text"])
    assert loads(story) == ["load a", "load b", "load c"] and unused == 0
    if card == "24GiB":
        assert [event for event in story if event in LOADED_AHEAD] == LOADED_AHEAD


def test_a_run_all_that_loads_the_extension_itself_is_looked_ahead_by_the_file(tmp_path):
    """The later cells were sent before, so it reads them from the notebook's file."""
    codes = [
        "%load_ext gpu\nfrom gpu_runtime.upcoming_cells import upcoming",
        f"x = 1; {LOOK}",
        "rt.use('b')",
        "1",
    ]
    cells = [
        {"cell_type": "code", "id": f"id{n}", "source": code, "metadata": {}, "outputs": []}
        for n, code in enumerate(codes)
    ]
    path = tmp_path / "n.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    with running_kernel(notebook=str(path)) as (_, client):
        printed = run_all(client, codes)[1][1]
    assert [uses for _, uses, _ in seen(printed)] == [(), ("b",), ()]
