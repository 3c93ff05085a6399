"""One reader serves all browser tabs of a Jupyter server, and carries out their actions."""

import getpass
import json
import os
from types import SimpleNamespace

import pytest
from gpu_panels import lab
from gpu_panels.lab import routes
from gpu_panels.lab import routes as readers
from gpu_panels.lab.routes import MOST_LEDGERS, Reader, title_of
from gpu_panels.lab.view import LabKernel
from tornado import web

import gpu_runtime
from gpu_runtime import watching
from gpu_runtime.errors import GpuError
from gpu_runtime.ledgers import reader as ledger_reader
from gpu_runtime.tables import Table
from tests.clock import Clock

KERNEL = LabKernel("k1", (41,), "train.ipynb")


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def reader(rt, clock, monkeypatch):
    """A reader whose tile follows the runtime `rt`. No kernel has a ledger open."""
    monkeypatch.setattr(watching, "followed", lambda: rt)
    monkeypatch.setattr(ledger_reader, "of_process", lambda pid: ())
    rt.register("qwen", backend="fake", size="8GiB")
    rt.preload("qwen")
    rt.tick()
    return Reader(clock)


def plain(answer):
    return json.loads(answer.body)


def qwen(reader):
    found = plain(reader.status([KERNEL]))
    [row] = [row for group in found["groups"] for row in group["rows"]]
    return found["ledger"]["key"], row


def test_many_tabs_cost_one_read_a_second(reader, rt, clock, monkeypatch):
    reads = []
    status = rt.status
    monkeypatch.setattr(type(rt), "status", lambda self: reads.append(1) or status())
    answers = {reader.status([KERNEL]).digest for _ in range(10)}
    assert len(answers) == 1 and len(reads) == 1
    assert reader.status([LabKernel("k2", (os.getpid(),), "b.ipynb")]).digest not in answers
    assert len(reads) == 1, "other kernels of the same snapshot"
    clock.now += 1.0
    rt.pin("qwen")
    assert reader.status([KERNEL]).digest not in answers
    assert len(reads) == 2


def test_the_answer_has_the_figures_of_the_ledger_and_no_url_or_password(reader):
    answer = reader.status([KERNEL])
    assert (
        plain(answer)["status"] == "sim:0 8/22 GiB · simulated" and plain(answer)["several"] == ""
    )
    assert b"://" not in answer.body
    assert title_of("redis://ops:secret@box:6379/0?password=x") == "redis box:6379/0"


def test_the_panel_has_a_line_about_the_own_week_which_is_read_every_five_minutes(
    reader, rt, clock, monkeypatch
):
    """Nobody else's hours are in the answer."""
    assert plain(reader.status([KERNEL]))["week"] == ""
    me, reads = getpass.getuser(), []
    hours = {"in_use_gib_h": 9.0, "idle_gib_h": 3.0, "blocking_gib_h": 0.5, "waited_h": 0.25}
    rows = [{"user": user, "card_h": 4.25, **hours} for user in ("bob", me)]
    monkeypatch.setattr(type(rt), "report", lambda *_: reads.append(1) or Table(rows))
    for _ in range(4):
        clock.now += 299.0
        found = plain(reader.status([KERNEL]))
    assert found["week"] == "Your week: 4.2 card-hours, 3.5 GiB-hours idle, waited 15 min"
    assert len(reads) == 2 and "bob" not in json.dumps(found)


def test_a_confirmed_eviction_is_carried_out_once(reader, rt, clock):
    key, row = qwen(reader)
    asked = reader.ask(key, "evict", row["id"])
    assert asked["title"] == "Evict qwen?" and asked["confirm"] == "Evict, freeing 8.0 GiB"
    assert reader.act(asked["question"])["done"]
    assert ", JupyterLab" in rt.why("qwen")[0].by
    assert plain(reader.status([KERNEL]))["status"] == "sim:0 0/22 GiB · simulated", (
        "without waiting a second"
    )
    with pytest.raises(GpuError, match="answered already"):
        reader.act(asked["question"])
    assert qwen(reader)[1]["actions"] == [{"verb": "restore", "label": "Restore", "why_not": ""}]


def test_an_action_is_refused_if_the_model_has_moved_since_the_question(reader, rt, clock):
    key, row = qwen(reader)
    asked = reader.ask(key, "evict", row["id"])
    rt.evict("qwen")
    outcome = reader.act(asked["question"])
    assert not outcome["done"] and "Nothing was done" in outcome["because"]
    rt.restore("qwen")
    clock.now += 1.0
    with rt.use("qwen"):
        refused = reader.ask(key, "evict", row["id"])
    assert "is in use now" in refused["refused"] and "question" not in refused


def test_the_last_questions_can_be_answered(reader, monkeypatch):
    """A dialog that nobody answered is forgotten at last."""
    monkeypatch.setattr(readers, "MOST_QUESTIONS", 2)
    key, row = qwen(reader)
    first, _, last = (reader.ask(key, "pin", row["id"])["question"] for _ in range(3))
    with pytest.raises(GpuError, match="answered already"):
        reader.act(first)
    assert reader.act(last)["done"]


def test_what_the_panel_does_not_offer_is_refused(reader):
    key, row = qwen(reader)
    for verb in ("close", "forget", "defrag", "__init__"):
        with pytest.raises(GpuError, match="no action of this panel"):
            reader.ask(key, verb, row["id"])
    with pytest.raises(GpuError, match="no longer shown"):
        reader.ask("unknown", "evict", row["id"])
    key, _ = qwen(reader)
    for verb in ("evict", "interrupt"):
        assert "has ended" in reader.ask(key, verb, "9.9.9/qwen")["refused"]


def test_the_kernel_of_a_script_can_be_interrupted(reader):
    """Its process publishes no cells. The panel refused, although the notebook's cell runs it."""
    key, row = qwen(reader)
    asked = reader.ask(key, "interrupt", row["id"].partition("/")[0] + "/")
    assert asked["confirm"] == "Interrupt"


@pytest.fixture
def second(tmp_path):
    """Another ledger with a model in it."""
    with gpu_runtime.Runtime(
        devices="sim:24GiB,host:64GiB", ledger=f"keeper://{tmp_path}/second", monitor=False
    ) as runtime:
        runtime.register("bge", backend="fake", size="3GiB")
        runtime.preload("bge")
        runtime.tick()
        yield runtime


def test_the_ledger_of_the_notebook_in_front_is_shown(reader, second, monkeypatch):
    """The console's tile opens another ledger, so the status bar says that two ledgers are active."""
    opened = ledger_reader.OpenLedger(second.status().ledger, watching.directory_of(second))
    monkeypatch.setattr(ledger_reader, "of_process", lambda pid: (opened,) if pid == 42 else ())
    monkeypatch.setattr(watching, "guest", lambda ledger: second)
    other = LabKernel("k2", (42,), "other.ipynb")
    found = plain(reader.status([KERNEL, other], front="k2"))
    assert found["status"] == "sim:0 3/22 GiB · simulated · 2 ledgers are active"
    assert found["ledger"]["title"].endswith("/second") and found["tile"] == "memory"
    found = plain(reader.status([KERNEL, other], front="k1"))
    assert found["status"] == "sim:0 8/22 GiB · simulated", (
        "the notebook in front uses the tile's ledger"
    )


def test_few_ledgers_are_open_at_the_same_time(reader, rt, monkeypatch):
    """A person may open many notebooks, each with a ledger of its own."""
    closed = []
    monkeypatch.setattr(watching, "close", closed.append)
    monkeypatch.setattr(watching, "directory_of", lambda rt: getattr(rt, "place", None))
    guests = [type("Guest", (), {"place": n})() for n in range(MOST_LEDGERS + 3)]
    for guest in (*guests, guests[1]):  # the second was shown again
        reader._of(guest)
    reader._close_unused()
    assert [rt.place for rt in closed] == [0, 2, 3]
    anew = type("Guest", (), {"place": 5})()
    assert reader._of(anew).rt is anew, "the ledger there was opened anew"


def test_a_kernel_on_another_machine_has_no_pid():
    """A gateway's kernels have no process here. The panel shows them without buttons."""

    class Gone:
        def get_kernel(self, id):
            raise KeyError(id)

    class Remote:
        def get_kernel(self, id):
            return object()

    assert routes.pid_of(Gone(), "k") == routes.pid_of(Remote(), "k") == 0


def test_a_server_without_the_environments_path_finds_the_command(tmp_path, monkeypatch):
    """JupyterLab that was started from a desktop has the PATH of the desktop."""
    for name in ("gpu", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    for _ in range(2):
        lab.make_command_found()
    assert os.environ["PATH"] == f"/nowhere:{tmp_path}"


@pytest.mark.parametrize("body", [b"\xff", b'{"a": NaN}', b'{"a": "\\ud800"}', b"[]", b"{}", b"7"])
def test_a_body_that_is_no_json_is_refused(body):
    """A body of bytes was a 500 in JupyterLab's routes."""
    handler = SimpleNamespace(request=SimpleNamespace(body=body))
    with pytest.raises(web.HTTPError) as refused:
        routes._Handler.body(handler, "a")
    assert refused.value.status_code == 400
