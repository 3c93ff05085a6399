"""Run All in real kernels: the extension sees the cells that wait, and models are loaded ahead."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parents[2]
LOOK = "print('seen', [(c.cell, c.uses, c.running) for c in upcoming.cells(['a', 'b', 'c'], lambda v: '')])"


@contextlib.contextmanager
def running_kernel(arguments=(), stderr=None):
    """A kernel on a simulated card with a ledger of its own, and its client."""
    paths = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", "")))
    )
    settings = {"GPU_LEDGER": "memory:", "GPU_DEVICES": "sim:24GiB,host:64GiB"}
    manager, client = start_new_kernel(
        env={**os.environ, **settings, "PYTHONPATH": paths, "JPY_SESSION_NAME": ""},
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


def results(client, ids, seconds=60.0):
    """(status, printed text) of each cell, once all have ended."""
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


def seen(text):
    """The cells that `LOOK` printed."""
    return eval(re.search(r"seen (.*)", text)[1])


def test_a_running_cell_sees_the_cells_that_wait_and_their_models(kernel):
    """JupyterLab sends every cell at once. None of them is lost, and each runs in its turn."""
    _, client = kernel
    run_all(client, ["%load_ext gpu", "order = []"])
    cells = [
        f"time.sleep(1); {LOOK}; order.append(1)",
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
    """`gpu autoload` loads the extension before the kernel reads its sockets."""
    log = tmp_path / "log"
    with log.open("w") as stderr, running_kernel(["--IPKernelApp.extensions=gpu"], stderr) as found:
        _, client = found
        first = ["from gpu_runtime.upcoming_cells import upcoming", f"x = 1; {LOOK}", "rt.use('b')"]
        printed = run_all(client, first)[1][1]
    assert [uses for _, uses, _ in seen(printed)] == [(), ("b",)]
    assert "Invalid message" not in log.read_text()


def test_an_error_and_an_interrupt_empty_the_schedule(kernel):
    manager, client = kernel
    run_all(client, ["%load_ext gpu"])
    failed = run_all(client, ["time.sleep(0.3)", "1/0", "print('not run')", "rt.use('a')"])
    assert [status for status, _ in failed] == ["ok", "error", "aborted", "aborted"]
    [(_, after)] = run_all(client, [LOOK])
    assert len(seen(after)) == 1, "only the cell that looks"

    ids = send(client, ["print('begun', flush=True); time.sleep(30)", "rt.use('a')"])
    while True:
        message = client.get_iopub_msg(timeout=30)
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
    """`%unload_ext` takes the tap away."""
    _, client = kernel
    run_all(client, ["%load_ext gpu", "%unload_ext gpu"])
    found = run_all(client, [f"time.sleep(0.2); {LOOK}", "print('ran')"])
    assert seen(found[0][1]) == [] and found[1] == ("ok", "ran\n")
