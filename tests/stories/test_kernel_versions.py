"""Parking and waiting cells in real kernels of ipykernel 6.30, installed beside, and of the installed version."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import HOST
from tests.clock import PATIENCE, finished, scaled, until

from . import notebooks
from .notebooks import CARD, DEVICES, Notebook, park, places, rest
from .test_look_ahead import awaited

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
        result = finished([*words, str(directory), *OLDER], timeout=scaled(100))
    except subprocess.TimeoutExpired:
        pytest.skip("pip did not install ipykernel 6.30 in time")
    if result.returncode:
        pytest.skip(f"pip cannot install ipykernel 6.30: {result.stderr.strip()[-200:]}")


@pytest.fixture(scope="module", params=["6", "7"])
def kernel(request, tmp_path_factory):
    """A notebook in a kernel of that version, with a tensor on the card, and a runtime that sees its place."""
    older = [request.getfixturevalue("older")] if request.param == "6" else []
    url = f"keeper://{tmp_path_factory.mktemp('book')}/ledger"
    python_path = os.pathsep.join([*older, notebooks.paths()])
    with (
        Notebook("one.ipynb", url, PYTHONPATH=python_path) as notebook,
        Runtime(devices=DEVICES, ledger=url, monitor=False) as rt,
    ):
        out = notebook.run(SET_UP)
        if f"v{request.param}." not in out:
            pytest.skip(f"the installed ipykernel is another one: {out}")
        rest(rt)
        yield notebook, rt


@pytest.fixture
def parked(kernel):
    """That notebook, parked, and the runtime."""
    park(kernel[1])
    return kernel


SET_UP = """
import ipykernel, os, torch, time
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


def request(
    notebook: Notebook, kind: str, channel: str = "shell", subshell: str = "", **content
) -> dict:
    """Sends a message, and returns the content of its reply; empty for a comm's message, which has none."""
    message = notebook.client.session.msg(kind, content)
    if subshell:
        message["header"]["subshell_id"] = subshell
    getattr(notebook.client, f"{channel}_channel").send(message)
    if kind.startswith("comm_"):
        return {}
    return notebook.reply(message["header"]["msg_id"], channel)


def debugger(notebook: Notebook, command: str, **arguments) -> dict:
    content = {"type": "request", "seq": 1, "command": command, "arguments": arguments}
    return request(notebook, "debug_request", "control", **content)


CELL = {"silent": False, "store_history": False, "user_expressions": {}}
EVALUATED = {**CELL, "code": "", "user_expressions": {"a": "probe"}}
# What is sent, and what the user's code noted: where the memory lay when that code ran.
READS = {
    "complete_request": ({"code": "probe.", "cursor_pos": 6}, "completion"),
    "inspect_request": ({"code": "probe", "cursor_pos": 5, "detail_level": 0}, "repr"),
    "execute_request": (EVALUATED, "repr"),
    "comm_open": ({"comm_id": "1", "target_name": "probe", "data": {}}, "opened"),
    "comm_msg": ({"comm_id": "1", "data": {}}, "message"),
    "comm_close": ({"comm_id": "1", "data": {}}, "closed"),
}
DEBUGGER_READS = {"inspectVariables": {}, "richInspectVariables": {"variableName": "probe"}}


def noted(notebook: Notebook) -> str:
    """What the user's code noted since the last call."""
    return notebook.run("print(story); story.clear()")


def test_the_memory_is_back_before_any_message_can_read_it(parked):
    """The object notes where the memory lies at the moment when the user's code runs."""
    notebook, rt = parked
    assert "came back from RAM" in notebook.run("assert float(x.sum()) == 5_000_000")
    for kind, (content, what) in READS.items():
        park(rt)
        request(notebook, kind, **content)
        out = noted(notebook)
        assert f"('{what}', 'sim:0')" in out and "host" not in out, (kind, out)
    for command, arguments in DEBUGGER_READS.items():
        park(rt)
        debugger(notebook, command, **arguments)
        out = noted(notebook)
        assert "('repr', 'sim:0')" in out and "host" not in out, (command, out)
    park(rt)
    request(notebook, "kernel_info_request")
    request(notebook, "is_complete_request", code="x")
    debugger(notebook, "debugInfo")
    assert places(rt) == {HOST}, "these messages run no code of the user's"


def test_a_cell_whose_memory_cannot_return_does_not_run(parked):
    """The user stops the wait: IPython would run the cell. One that touches no object of the user's runs at once."""
    notebook, rt = parked
    rt.register("big", backend="fake", size="41MiB", importance="urgent")
    with rt.use("big", timeout=PATIENCE):
        assert "big" in notebook.run("%gpu leases") and "in RAM" in notebook.run("%gpu who")
        assert notebook.run("1 + 1") == "2" and places(rt) == {HOST}
        message = notebook.client.execute("story.append(bool(x.numel()))")
        until(lambda: rt.status().tickets)
        notebook.manager.interrupt_kernel()
        reply = notebook.reply(message)
        assert (reply["status"], reply["ename"]) == ("error", "WaitEnded")
    rt.evict("big")
    rt.forget("big")
    assert "[] 5000000.0" in notebook.run("print(story, float(x.sum()))")


def test_a_notebook_with_a_subshell_is_parked_unless_the_subshell_runs_a_cell(parked, tmp_path):
    """JupyterLab keeps one open for the messages of widgets. It has a thread of its own, and the memory before."""
    notebook, rt = parked
    features = request(notebook, "kernel_info_request").get("supported_features", ())
    if "kernel subshells" not in features:
        pytest.skip("this ipykernel has no subshells")
    subshell = request(notebook, "create_subshell_request", "control")["subshell_id"]
    cell = {**CELL, "code": "story.append(('cell', place()))"}
    reads = {"complete_request": READS["complete_request"], "execute_request": (cell, "cell")}
    for kind, (content, what) in reads.items():
        park(rt)
        request(notebook, kind, subshell=subshell, **content)
        assert noted(notebook) == f"[('{what}', 'sim:0')]\n"
    begun, end = tmp_path / "begun", tmp_path / "end"
    code = f"open({str(begun)!r}, 'w')\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
    running = notebook.client.session.msg("execute_request", {**CELL, "code": code})
    running["header"]["subshell_id"] = subshell
    notebook.client.shell_channel.send(running)
    until(begun.exists)
    with pytest.raises(GpuError):
        rt.park("one.ipynb")
    assert places(rt) == {CARD}
    end.touch()
    notebook.reply(running["header"]["msg_id"])
    park(rt)
    request(notebook, "delete_subshell_request", "control", subshell_id=subshell)
    assert "5000000.0" in notebook.run("print(float(x.sum()))")


def test_the_debugger_starts_in_a_parked_kernel(parked):
    """Its own cell runs while the control channel's thread is blocked, so the memory returns before."""
    notebook, rt = parked
    arguments = {"clientID": "test", "adapterID": "", "pathFormat": "path", "locale": "en"}
    reply = debugger(notebook, "initialize", linesStartAt1=True, columnsStartAt1=True, **arguments)
    assert reply["success"], reply
    assert debugger(notebook, "attach")["success"]
    park(rt)  # debugpy hides the kernel's threads, which were taken for the user's
    assert "5000000.0" in notebook.run("print(float(x.sum()))")
    debugger(notebook, "disconnect", restart=False, terminateDebuggee=False)


def test_a_console_that_is_opened_and_used_in_a_parked_notebook_leaves_it_parked(parked):
    """The console reads no tensor. Its page sends a message about once a second."""
    notebook, rt = parked
    client, shown = notebook.client, []
    user, client.session.username = client.session.username, ""  # as in a request of JupyterLab
    try:
        client.execute_interactive("%gpu console", timeout=scaled(90), output_hook=shown.append)
    finally:
        client.session.username = user
    assert places(rt) == {HOST}
    target = re.search(r'"client_comm_id":"(\w+)"', "".join(str(one) for one in shown))
    assert target, shown
    request(notebook, "comm_open", comm_id="console", target_name=target[1], data={})
    request(notebook, "comm_msg", comm_id="console", data={})
    request(notebook, "kernel_info_request")  # its reply comes after the others were handled
    assert places(rt) == {HOST}
    assert "5000000.0" in notebook.run("print(float(x.sum()))")


def test_the_cells_that_wait_are_seen_and_run_in_their_order(kernel):
    """With "Run All", a running cell knows the models of the cells that were sent with it."""
    notebook, _ = kernel
    notebook.run("for name in 'uv': rt.register(name, backend='fake', size='8MiB')")
    sent = (
        awaited(4),
        "from gpu_runtime.notebook import upcoming\n"
        "seen = [cell.uses for cell in upcoming.cells(['u', 'v'], lambda value: '')]",
        "with rt.use('u'): story.append('u')",
        "with rt.use('v'): story.append('v')",
    )
    for code in sent:
        notebook.client.execute(code)
    out = notebook.run("print([uses for uses in seen if uses], story)")
    assert "[('u',), ('v',)] ['u', 'v']" in out
