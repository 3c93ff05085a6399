"""Parking and waiting cells in real kernels of ipykernel 6.30, installed beside, and of the installed version."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import HOST
from tests.clock import PATIENCE, scaled, until
from tests.stories.test_look_ahead import awaited
from tests.stories.test_parking import DEVICES, ROOT, Notebook, places

OLDER = ("ipykernel==6.30.1", "nest-asyncio==1.6.0", "jupyter_client==8.6.3")


@pytest.fixture(scope="module")
def older() -> str:
    """A directory with ipykernel 6.30. It is kept in the environment, so that it is installed once."""
    directory = Path(sys.prefix) / "ipykernel-6.30"
    with FileLock(f"{directory}.lock", timeout=scaled(120)):
        done = directory / "installed"  # written last: an interrupted installation is repeated
        if not done.exists():
            _install(directory)
            done.touch()
    return str(directory)


def _install(directory: Path) -> None:
    words = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target")
    try:
        result = subprocess.run(
            [*words, str(directory), *OLDER], capture_output=True, text=True, timeout=scaled(100)
        )
    except subprocess.TimeoutExpired:
        pytest.skip("pip did not install ipykernel 6.30 in time")
    if result.returncode:
        pytest.skip(f"pip cannot install ipykernel 6.30: {result.stderr.strip()[-200:]}")


@pytest.fixture(scope="module", params=["6", "7"])
def kernel(request, tmp_path_factory):
    """A notebook in a kernel of that version, with a tensor on the card, and a runtime that sees its place."""
    paths = [str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", "")]
    if request.param == "6":
        paths.insert(0, request.getfixturevalue("older"))
    url = f"keeper://{tmp_path_factory.mktemp('book')}/ledger"
    notebook = Notebook("a.ipynb", url, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    with Runtime(devices=DEVICES, ledger=url, monitor=False) as rt:
        try:
            out = notebook.run(SET_UP)
            if f"v{request.param}." not in out:
                pytest.skip(f"the installed ipykernel is another one: {out}")
            until(lambda: places(rt).get("a.ipynb") == {"sim:0"})
            yield notebook, rt
        finally:
            notebook.close()


SET_UP = """
import ipykernel, torch, time
print('v' + ipykernel.__version__)
x = torch.ones(5_000_000)
story = []
from gpu_runtime import runtime
def place():
    return next(l.where for l in runtime().status().leases() if l.kind == "kernel")
class Probe:
    def __dir__(self):
        story.append(("completion", place()))
        return ["one"]
    def __repr__(self):
        story.append(("repr", place()))
        return "probe"
probe = Probe()
def opened(comm, message):
    story.append(("opened", place()))
    def fail(message):
        story.append(("message", place()))
        raise ValueError  # the kernel can be parked all the same
    comm.on_msg(fail)
    comm.on_close(lambda message: story.append(("closed", place())))
get_ipython().kernel.comm_manager.register_target("probe", opened)
get_ipython().Completer.use_jedi = False
"""


def park(notebook, rt) -> None:
    refusals: list[str] = []

    def is_parked() -> bool:
        try:
            rt.park("a.ipynb")
        except GpuError as error:  # the end of its last cell is published within a second
            refusals.append(f"{time.monotonic():.1f}: {error}")
        return places(rt)["a.ipynb"] == {HOST}

    with contextlib.suppress(AssertionError):
        until(is_parked)
    assert places(rt)["a.ipynb"] == {HOST}, refusals[-3:]


def request(client, kind: str, channel: str = "shell", subshell: str = "", **content) -> dict:
    """Sends a message, and returns the content of its reply; empty for a comm's message, which has none."""
    sender = getattr(client, f"{channel}_channel")
    message = client.session.msg(kind, content)
    if subshell:
        message["header"]["subshell_id"] = subshell
    sender.send(message)
    if kind.startswith("comm_"):
        return {}
    while True:
        reply = sender.get_msg(timeout=PATIENCE)
        if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
            return reply["content"]


def debugger(client, command: str, **arguments) -> dict:
    content = {"type": "request", "seq": 1, "command": command, "arguments": arguments}
    return request(client, "debug_request", "control", **content)


# What is sent, and what the user's code noted: where the memory lay when that code ran.
READS = {
    "completion": (
        lambda client: request(client, "complete_request", code="probe.", cursor_pos=6),
        "completion",
    ),
    "inspection": (
        lambda client: request(
            client, "inspect_request", code="probe", cursor_pos=5, detail_level=0
        ),
        "repr",
    ),
    "user_expressions": (
        lambda client: request(
            client, "execute_request", code="", silent=False, user_expressions={"a": "probe"}
        ),
        "repr",
    ),
    "comm_open": (
        lambda client: request(client, "comm_open", comm_id="1", target_name="probe", data={}),
        "opened",
    ),
    "comm_msg": (lambda client: request(client, "comm_msg", comm_id="1", data={}), "message"),
    "comm_close": (lambda client: request(client, "comm_close", comm_id="1", data={}), "closed"),
    "variables": (lambda client: debugger(client, "inspectVariables"), "repr"),
    "a rich variable": (
        lambda client: debugger(client, "richInspectVariables", variableName="probe"),
        "repr",
    ),
}


def test_the_memory_is_back_before_any_message_can_read_it(kernel):
    """The object notes where the memory lies at the moment when the user's code runs."""
    notebook, rt = kernel
    park(notebook, rt)
    assert "came back from RAM" in notebook.run("assert float(x.sum()) == 5_000_000")
    for way, (send, noted) in READS.items():
        park(notebook, rt)
        send(notebook.client)
        out = notebook.run("print(story); story.clear()")
        assert f"('{noted}', 'sim:0')" in out and "host" not in out, (way, out)
    park(notebook, rt)
    request(notebook.client, "kernel_info_request")
    request(notebook.client, "is_complete_request", code="x")
    debugger(notebook.client, "debugInfo")
    assert places(rt)["a.ipynb"] == {HOST}, "these messages run no code of the user's"


def test_a_cell_without_its_memory_is_refused(kernel):
    """Stopping the wait refuses the cell. IPython would run it although the hook was interrupted."""
    notebook, rt = kernel
    park(notebook, rt)
    rt.register("big", backend="fake", size="41MiB", importance="urgent")
    with rt.use("big", timeout=PATIENCE):
        message = notebook.client.execute("story.append('ran')")
        until(lambda: bool(rt.status().tickets))
        notebook.manager.interrupt_kernel()
        reply = notebook.client.get_shell_msg(timeout=PATIENCE)
        while reply["parent_header"].get("msg_id") != message:
            reply = notebook.client.get_shell_msg(timeout=PATIENCE)
        assert reply["content"]["status"] == "error"
    rt.evict("big")
    # ipykernel 6 may still abort cells for a moment after the failed one.
    until(lambda: "[] 5000000.0" in notebook.run("print(story, float(x.sum()))"))


def test_the_memory_is_back_before_a_subshell_reads_it(kernel):
    """A subshell handles its messages in a thread of its own, while the main thread waits."""
    notebook, rt = kernel
    client = notebook.client
    features = request(client, "kernel_info_request").get("supported_features", ())
    if "kernel subshells" not in features:
        pytest.skip("this ipykernel has no subshells")
    cell = {"code": "story.append(('cell', place()))", "silent": False, "store_history": False}
    reads = {
        "completion": ("complete_request", {"code": "probe.", "cursor_pos": 6}),
        "cell": ("execute_request", {**cell, "user_expressions": {}}),
    }
    for noted, (kind, content) in reads.items():
        park(notebook, rt)
        subshell = request(client, "create_subshell_request", "control")["subshell_id"]
        request(client, kind, subshell=subshell, **content)
        request(client, "delete_subshell_request", "control", subshell_id=subshell)
        assert f"[('{noted}', 'sim:0')]" in notebook.run("print(story); story.clear()")


def test_a_notebook_with_a_subshell_is_parked_unless_the_subshell_runs_a_cell(kernel):
    """JupyterLab keeps a subshell open for the messages of widgets, so it must not keep the memory on the card."""
    notebook, rt = kernel
    client = notebook.client
    features = request(client, "kernel_info_request").get("supported_features", ())
    if "kernel subshells" not in features:
        pytest.skip("this ipykernel has no subshells")
    subshell = request(client, "create_subshell_request", "control")["subshell_id"]
    cell = {"silent": False, "store_history": False, "user_expressions": {}}
    for _ in range(3):
        park(notebook, rt)
        code = "story.append(('cell', place()))"
        request(client, "execute_request", subshell=subshell, code=code, **cell)
        assert "[('cell', 'sim:0')]" in notebook.run("print(story); story.clear()")
    running = client.session.msg("execute_request", {"code": "time.sleep(3)", **cell})
    running["header"]["subshell_id"] = subshell
    client.shell_channel.send(running)
    with contextlib.suppress(GpuError):
        rt.park("a.ipynb")
    if not client.shell_channel.msg_ready():  # on a busy machine the cell may have ended
        assert places(rt)["a.ipynb"] == {"sim:0"}
    client.shell_channel.get_msg(timeout=PATIENCE)
    park(notebook, rt)
    request(client, "delete_subshell_request", "control", subshell_id=subshell)
    assert "5000000.0" in notebook.run("print(float(x.sum()))")


def test_the_debugger_starts_in_a_parked_kernel(kernel):
    """Its own cell runs while the control channel's thread is blocked, so the memory returns before."""
    notebook, rt = kernel
    park(notebook, rt)
    arguments = {"clientID": "test", "adapterID": "", "pathFormat": "path", "locale": "en"}
    reply = debugger(
        notebook.client, "initialize", linesStartAt1=True, columnsStartAt1=True, **arguments
    )
    assert reply["success"], reply
    assert debugger(notebook.client, "attach")["success"]
    park(notebook, rt)  # debugpy hides the kernel's threads, which were taken for the user's
    assert "5000000.0" in notebook.run("print(float(x.sum()))")
    debugger(notebook.client, "disconnect", restart=False, terminateDebuggee=False)


def test_a_console_that_is_opened_and_used_in_a_parked_notebook_leaves_it_parked(kernel):
    """The console reads no tensor. Its page sends a message about once a second."""
    notebook, rt = kernel
    client, shown = notebook.client, []
    park(notebook, rt)
    user, client.session.username = client.session.username, ""  # as in a request of JupyterLab
    try:
        client.execute_interactive("%gpu console", timeout=scaled(90), output_hook=shown.append)
    finally:
        client.session.username = user
    assert places(rt)["a.ipynb"] == {HOST}
    target = re.search(r'"client_comm_id":"(\w+)"', "".join(str(one) for one in shown))
    assert target, shown
    request(client, "comm_open", comm_id="console", target_name=target[1], data={})
    request(client, "comm_msg", comm_id="console", data={})
    request(client, "kernel_info_request")  # its reply comes after the other messages were handled
    assert places(rt)["a.ipynb"] == {HOST}
    assert "5000000.0" in notebook.run("print(float(x.sum()))")


def test_the_cells_that_wait_are_seen_and_run_in_their_order(kernel):
    """With "Run All", a running cell knows the models of the cells that were sent with it."""
    notebook, _ = kernel
    notebook.run("for name in 'uv': rt.register(name, backend='fake', size='8MiB')")
    sent = (
        awaited(4),
        "from gpu_runtime.upcoming_cells import upcoming\n"
        "seen = [cell.uses for cell in upcoming.cells(['u', 'v'], lambda value: '')]",
        "with rt.use('u'): story.append('u')",
        "with rt.use('v'): story.append('v')",
    )
    for code in sent:
        notebook.client.execute(code)
    out = notebook.run("print([uses for uses in seen if uses], story)")
    assert "[('u',), ('v',)] ['u', 'v']" in out
