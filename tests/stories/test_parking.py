"""Notebooks of plain torch code share a simulated card that holds only one of them. No cell uses `rt`."""

import getpass
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import nbformat
import pytest

from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import HOST
from gpu_runtime.facts.problems import Problem, ProblemKind, problems
from gpu_runtime.notebook import cell_key, is_remembered
from gpu_runtime.owner import requests
from tests.clock import PATIENCE, scaled, until
from tests.user_modes import MODES

from .notebooks import (
    CARD,
    DEVICES,
    Notebook,
    asked_to_park,
    held_bytes,
    park,
    places,
    rest,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The ledger of this module."""
    return f"keeper://{tmp_path_factory.mktemp('parking')}/ledger"


@pytest.fixture(scope="module")
def kernels(url):
    """Two notebooks that the tests share: a kernel with torch takes three seconds of the processor."""
    both = [Notebook(name, url, GPU_PARK_TURN_SECONDS="2") for name in ("one.ipynb", "two.ipynb")]
    for notebook in both:
        notebook.run("%gpu doctor")  # it starts the thread that calls the driver
    yield both
    for notebook in both:
        notebook.close()


@pytest.fixture
def rt(url):
    """A runtime that reads the ledger."""
    with Runtime(devices=DEVICES, ledger=url, monitor=False) as runtime:
        yield runtime


@pytest.fixture
def two(kernels, rt):
    """The two notebooks, without any variables that hold memory."""
    yield kernels
    for notebook in kernels:
        notebook.run("%reset -f")
    until(lambda: not any(held_bytes(rt, notebook.name) for notebook in kernels))


def test_a_notebook_that_cannot_return_saves_and_deletes_what_it_types(two, rt, tmp_path):
    """Another one keeps the card. In 0.2 no cell ran, so the message's advice could not be typed: it is here."""
    parked, keeper = two
    assert "holds less than 1.0 MiB on a card" in parked.run("%gpu park")
    parked.run("import torch; x = torch.full((7_500_000,), 3.0); y = torch.ones(300_000)")
    rest(rt)
    until(lambda: "RAM" in keeper.run("%gpu park one.ipynb"))
    keeper.run("import torch; z = torch.zeros(9_000_000)")
    keeper.run("%gpu park never")
    rest(rt, "two.ipynb", 36_000_000)
    refused = parked.run("x += 1")
    assert "did not run" in refused and "two.ipynb" in refused and "exempt from parking" in refused
    for way in ("del NAME", "%gpu free NAME", "torch.save(NAME, 'name.pt')"):
        assert way in refused
    assert "exempt from parking" in parked.run("%gpu unpark")
    assert "29.8 MiB is parked in RAM" in parked.run("%gpu who")
    assert parked.run("print(float(x[0]), x[-2:].max())").strip() == "3.0 tensor(3.)"
    path = tmp_path / "x.pt"
    assert parked.run(f"torch.save({{'x': x, 'step': 7}}, {str(path)!r})") == ""
    assert "1.1 MiB came free" in parked.run("%gpu free y")
    assert "28.6 MiB came free. Nothing is parked any more." in parked.run("del x")
    assert parked.run(f"print(torch.load({str(path)!r})['x'].sum().item())").strip() == "22500000.0"
    keeper.run("%gpu park asked")


def test_two_notebooks_that_fill_card_and_ram_change_places_in_pieces(tmp_path):
    """40 MiB and 18 in RAM, which has 24 and never room for the 40. In 0.2 the second was locked out."""
    devices, url = "sim:48MiB,host:48MiB", f"keeper://{tmp_path}/ledger"
    with (
        Notebook("one.ipynb", url, GPU_DEVICES=devices) as one,
        Notebook("two.ipynb", url, GPU_DEVICES=devices) as two,
        Runtime(devices=devices, ledger=url, monitor=False) as rt,
    ):
        fill = "import torch; x = [torch.full((2**19,), float(i)) for i in range({})]"
        one.run(fill.format(9))
        rest(rt)
        park(rt)
        two.run(fill.format(20))
        rest(rt, "two.ipynb")
        for notebook, count in ((one, 9), (two, 20), (one, 9)):
            shown = notebook.run("print([int(one[-1]) for one in x])")
            assert str(list(range(count))) in shown, shown
            assert places(rt, notebook.name) == {CARD}


# What a cell begins, what ends it, and the reason that the notebook gives while it is pending.
OBSTACLES = {
    "a timer": (
        "import threading\nt = threading.Timer(600, x.sum); t.start()",
        "t.cancel(); t.join()",
        "a thread of its own runs",
    ),
    "a thread with the name of a thread of the kernel": (
        "import time; over = threading.Event()\n"
        "def beat():\n    while not over.wait(0.01): x.add_(0)\n"
        "t = threading.Thread(target=beat, name='Heartbeat'); t.start()",
        "over.set(); t.join()",
        "(Heartbeat: threading.Thread calls the function __main__.beat)",
    ),
    "an armed timer": (
        "import signal\ndef tick(*_): x.add_(0)\n"
        "old = signal.signal(signal.SIGALRM, tick); signal.setitimer(signal.ITIMER_REAL, 600)",
        "signal.setitimer(signal.ITIMER_REAL, 0); _ = signal.signal(signal.SIGALRM, old)",
        "a timer is armed (signal.ITIMER_REAL, which calls the function __main__.tick)",
    ),
    "a server": (
        "import asyncio\nasync def serve(reader, writer): x.add_(0)\n"
        "server = await asyncio.start_server(serve, '127.0.0.1', 0)",
        "server.close()",
        "which calls the function __main__.serve",
    ),
    "a periodic callback": (
        "from tornado.ioloop import PeriodicCallback\n"
        "h = PeriodicCallback(lambda: x.sum(), 600_000); h.start()",
        "h.stop()",
        "PeriodicCallback._run, which calls the function __main__.<lambda>",
    ),
}
# These wait for a cell, or wake and find nothing of the user's. They do not prevent parking.
IDLE = (
    "import queue, threading\n"
    "from concurrent.futures import ThreadPoolExecutor\n"
    "pool = ThreadPoolExecutor(1); pool.submit(int).result()\n"
    "todo = queue.Queue(); consumer = threading.Thread(target=todo.get); consumer.start()",
    "%%bash\ntrue",  # IPython keeps a thread with an event loop
    "from tqdm import tqdm\nbar = tqdm(range(3)); next(iter(bar))",  # a thread that wakes each 10 s
    "writer = threading.Thread(target=todo.get, kwargs={'timeout': 600}, daemon=True); writer.start()",
)


def test_what_could_run_meanwhile_keeps_the_notebook_and_is_named(two, rt):
    """By the failed park and by `%gpu why`. When the obstacle has ended, the notebook is parked."""
    one, _ = two
    one.run("import torch; x = torch.ones(5_000_000)")
    for name, (begin, end, reason) in OBSTACLES.items():
        one.run(begin)
        asked_to_park(rt, lambda answer, reason=reason: reason in answer)
        assert any(reason in event.because for event in rt.why("one.ipynb")), name
        assert places(rt) == {CARD}, name
        one.run(end)
    for idle in IDLE:
        one.run(idle)
    park(rt)
    assert "x is whole" in one.run("if bool((x == 1).all()): print('x is whole')")
    one.run("todo.put(1); todo.put(1); consumer.join(); pool.shutdown(); bar.close()")


def test_the_prompt_of_the_debugger_has_the_memory_and_keeps_it(two, rt):
    """`%debug` shows tensors of the failed frame, and the prompt that waits is not parked."""
    failed = two[0]
    failed.run("import torch\ndef f():\n    y = torch.ones(5_000_000)\n    raise ValueError(1)")
    assert "ValueError" in failed.run("f()")
    rest(rt)
    park(rt)
    typed, seen, shown = ["p float(y.sum())", "q"], [], []

    def answer(message):
        with pytest.raises(GpuError):
            rt.park("one.ipynb")
        seen.append(places(rt))
        failed.client.input(typed.pop(0))

    failed.client.execute_interactive(
        "%debug", allow_stdin=True, stdin_hook=answer, output_hook=shown.append, timeout=scaled(90)
    )
    texts = [one["content"]["text"] for one in shown if one["msg_type"] == "stream"]
    assert seen == [{CARD}] * 2 and "5000000.0" in "".join(texts)
    failed.run("%gpu free")  # the frames of the last error


def test_cells_that_were_sent_together_leave_the_card_at_the_end_of_a_turn(two, rt):
    """ "Run All" sends every cell at once, so the kernel is never idle. The other notebook waits for one turn."""
    runs, waits = two
    waits.run("import torch; y = torch.ones(7_500_000)")
    rest(rt, "two.ipynb")
    runs.run("import torch, time; x = torch.ones(7_500_000)")
    until(lambda: places(rt, "two.ipynb") == {HOST})
    with ThreadPoolExecutor(1) as other:
        answer = other.submit(waits.run, "print(float(y.sum()))")
        sent = done = 0
        while not answer.done():
            while sent < done + 5:  # cells always wait, so the kernel is never idle
                runs.client.execute("time.sleep(0.25); x.add_(1)")
                sent += 1
            runs.client.get_shell_msg(timeout=PATIENCE)
            done += 1
        assert "7500000.0" in answer.result()
    for _ in range(sent - done):
        runs.client.get_shell_msg(timeout=PATIENCE)
    assert f"{sent + 1}.0 {sent + 1}.0" in runs.run("print(float(x.min()), float(x.max()))")


def test_a_cell_that_runs_a_notebook_with_an_empty_cell_is_in_use(two, rt, tmp_path):
    """The lease had no pin while the rest of the cell ran, so the memory could leave in the middle of it."""
    one, _ = two
    cells = [nbformat.v4.new_code_cell(source) for source in ("y = 2", "", "z = 3", " ")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "setup.ipynb")
    one.run("import torch; x = torch.ones(5_000_000)")
    rest(rt)
    shown = one.run(
        f"%run {tmp_path}/setup.ipynb\nfrom gpu_runtime import runtime\n"
        "print(y, z, [lease.pins for lease in runtime().status().leases() if lease.name == 'kernel'])"
    )
    assert "2 3 [1]" in shown
    park(rt)


def test_a_mode_that_a_cell_leaves_open_locks_nobody_out(two, rt):
    """One that raises on `torch.device` made every cell fail before it ran, also the one that ends it."""
    one, other = two
    one.run("import torch; from tests.user_modes import MODES; x = torch.ones(5_000_000)")
    for name in MODES:
        assert one.run(f"mode = MODES[{name!r}](); _ = mode.__enter__(); print('open')") == "open\n"
        park(rt)
        shown = one.run("size = len(MODES); print('a cell ran')")
        assert "came back from RAM" in shown and "a cell ran" in shown, (name, shown)
        for verb in ("%gpu", "%gpu who", "%gpu why kernel", "%gpu doctor", "%gpu free nothing"):
            assert "user's mode" not in one.run(verb), (name, verb)
        assert "leaves when" in one.run("%gpu park"), name
        until(lambda: places(rt) == {HOST})
        assert "user's mode" not in one.run("%gpu unpark"), name
        assert "'ones'" in str(one.reply(one.client.complete("torch.on"))["matches"]), name
        ended = "mode.__exit__(None, None, None); print(float(x.sum()))"
        assert "5000000.0" in one.run(ended), name


def test_a_kernel_that_is_hung_in_c_is_silent_and_the_row_says_what_to_type(
    two, rt, monkeypatch, tmp_path
):
    """Nobody waits for it. Its cell began and gave up Python's lock no more, so the book called it idle and healthy."""
    monkeypatch.setattr(requests, "HUNG_SECONDS", 2.0)
    hung, _ = two
    hung.run("import re, torch; x = torch.ones(5_000_000)")
    rest(rt)
    begins = tmp_path / "begins"
    message = hung.client.execute(
        f"open({str(begins)!r}, 'w'); re.match(r'(a+)+$', 'a' * 60 + 'b')"
    )
    until(begins.exists)

    def silent() -> list[Problem]:
        """On a busy machine the other notebook may be silent for as long."""
        found = [one for one in problems(rt.status()) if one.kind is ProblemKind.SILENT]
        return [one for one in found if "one.ipynb" in one.text]

    [one] = until(silent)
    assert getpass.getuser() not in one.text, "it is the own one"
    assert f"kill -INT {hung.pid}" in one.text and f"kill -9 {hung.pid}" in one.text

    def is_silent_since_its_last_sign() -> bool:
        asked = time.time()
        with pytest.raises(GpuError):
            rt.park("one.ipynb")
        return silent()[0].wall < asked

    until(is_silent_since_its_last_sign, "it is silent since the request")
    os.kill(hung.pid, signal.SIGINT)
    assert hung.reply(message)["ename"] == "KeyboardInterrupt"
    until(lambda: not silent())


TAKES_MOST = """import torch
from gpu_runtime import runtime
others = [lease for lease in runtime().status().leases() if lease.kind == "kernel"]
print([lease.where for lease in others if lease.bytes > 15_000_000])
x = torch.zeros(6_250_000)
"""


def test_a_restarted_kernel_finds_free_what_its_first_cell_takes(two, rt, url):
    """The other notebook's memory has left before the first line of the cell, and not because of an overdraft."""
    with Notebook("again.ipynb", url) as before:
        assert "[]" in before.run(TAKES_MOST)
        # On a busy machine the count is made after the cell.
        until(lambda: is_remembered(cell_key("/work/again.ipynb", TAKES_MOST)))
    two[0].run("import torch; x = torch.ones(6_250_000)")
    rest(rt, least_bytes=25_000_000)
    with Notebook("again.ipynb", url) as after:
        assert "['host']" in after.run(TAKES_MOST)
        assert "took" in after.run("%gpu why kernel")


def test_a_first_cell_whose_tensors_are_of_a_subclass_is_counted(url, rt):
    """As a model in 4 bits: its weights are tensors of a class of their own, and nothing else is large."""
    with Notebook("packed.ipynb", url) as notebook:
        notebook.run(
            "import torch\nclass Packed(torch.nn.Parameter): pass\n"
            "weight = Packed(torch.ones(5_000_000, dtype=torch.uint8), requires_grad=False)"
        )
        rest(rt, "packed.ipynb", least_bytes=5_000_000)


FAILS_ONCE = """tries.append(1)
if len(tries) < 2:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 22.00 MiB.")
print("tries", len(tries))
"""


def test_a_cell_runs_again_after_room_was_made_only_with_consent(two, rt):
    idle, needs = two
    needs.run("import torch; tries = []; mine = torch.zeros(500_000)")
    idle.run("import torch; x = torch.ones(6_250_000)")
    rest(rt)
    told = needs.run(FAILS_ONCE)
    assert "one.ipynb stepped aside" in told and "run the cell again" in told
    assert "tries" not in told.split()
    assert "['1']" in needs.run("print([str(len(tries))]); tries = []")
    assert "came back from RAM" in idle.run("assert float(x.sum()) == 6_250_000")
    rest(rt)
    told = needs.run("%%gpu --retry\n" + FAILS_ONCE)
    assert "(one.ipynb stepped aside): the cell runs again" in told and "tries 2" in told


def test_others_see_since_when_a_notebook_is_busy_and_since_when_it_is_idle(two, rt, tmp_path):
    one, end = two[0], tmp_path / "end"

    def state() -> tuple[float, float]:
        [section] = [
            one
            for one in rt.status().sections.values()
            if one.owner.notebook.endswith("/one.ipynb")
        ]
        return section.busy_since, section.idle_since

    until(lambda: state()[0] == 0 < state()[1])
    before, began = state(), rt.status().now
    one.client.execute(f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.02)")
    until(lambda: state()[0] > 0)
    busy, idle = state()
    # The book has tenths of a second.
    assert began - 0.2 <= busy <= rt.status().now + 0.1 and idle == 0.0 and before[1] <= busy
    ending = rt.status().now
    end.touch()
    until(lambda: state()[0] == 0.0)
    assert ending - 1 <= state()[1] <= rt.status().now, "whole seconds"
