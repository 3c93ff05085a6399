"""The status bar and the side panel of JupyterLab: what they show of a snapshot."""

import json
from types import SimpleNamespace

import pytest
from gpu_panels.data.rows import FirstSeen
from gpu_panels.lab import view
from gpu_panels.lab.view import LabKernel, LedgerName
from msgspec.structs import replace

from gpu_runtime.facts import HOST, Presence, ProcessState, Share, Staying, Ticket

from .samples import BOB, GIB, ME, NOW, WALL, lease, snapshot

HERE = LedgerName("a1", "sqlite …/ledger/here")
THERE = LedgerName("b2", "sqlite …/ledger/there")
TRAIN = LabKernel("k1", (ME.pid,), "notes/train.ipynb")


def shown(world, **more):
    return view.shown(world, [TRAIN], HERE, **more)


def ticket(name="llama", waited=7.0, gib=8):
    need = replace(lease(name, gib), owner=BOB.id).shares
    return Ticket("k", BOB.id, "use", name, NOW - waited, NOW, need=need, because="qwen is in use")


@pytest.mark.parametrize(("cards", "held", "text"), [
    (1, (14,), "sim:0 14/22 GiB · simulated"),
    (1, (8.5,), "sim:0 8.5/22 GiB · simulated"),
    (1, (), "sim:0 0/22 GiB · simulated"),
    (2, (14, 3), "sim:0 14/22 GiB · sim:1 3/22 GiB · simulated"),
    (8, (14, 3), "8 GPUs 17/173 GiB · simulated"),
])  # fmt: skip
def test_the_status_bar_has_used_and_usable_memory_of_the_cards(cards, held, text):
    leases = [lease(f"m{n}", gib, f"sim:{n}") for n, gib in enumerate(held)]
    assert shown(snapshot(*leases, cards=cards))["status"] == text
    one = shown(snapshot(*leases, cards=cards))
    assert one["sum"] == (text if cards != 2 else "2 GPUs 17/43 GiB · simulated")
    assert one["notes"] == ["simulated"]
    small = snapshot(lease("m", 1 / 32), gib=192 / 1024)
    assert shown(small)["status"] == "sim:0 32/173 MiB · simulated"


def test_memory_without_a_lease_counts_as_used_and_what_cannot_be_parked_has_its_reason():
    """A card that another program fills is not free."""
    world = snapshot(lease("qwen", 4, "cuda:0"), simulated=False, strangers=10)
    assert shown(world)["status"] == "cuda:0 14/22 GiB"
    assert shown(world)["groups"][-1]["title"] == "programs without gpu-console"
    card = shown(world)["devices"][0]
    assert card["fill"] == "14.0 of 21.6 GiB, 10.0 GiB of programs without gpu-console", (
        "as in the status bar"
    )
    world = snapshot(lease("qwen", 4))
    stays = (Staying("sim:0", "NumPy uses it", GIB),)
    mine = replace(world.sections[ME.id], leases=(), residue={"sim:0": GIB}, staying=stays)
    [group] = shown(replace(world, sections={ME.id: mine}))["groups"]
    [row] = group["rows"]
    assert (row["name"], row["bytes"], row["where"]) == ("its own code", "1.0 GiB", "sim:0")
    assert row["state"] == "stays: NumPy uses it" and group["bytes"] == "1.0 GiB"


@pytest.mark.parametrize(("held", "level"), [
    (1, "LOW"), (16, "MODERATE"), (19, "HIGH"), (21, "CRITICAL"),
])  # fmt: skip
def test_each_card_has_its_level(held, level):
    ram, card = sorted(shown(snapshot(lease("m", held)))["devices"], key=lambda one: one["id"])
    assert (card["level"], ram["level"]) == (level, "")


def test_a_card_has_its_utilisation_and_who_waits_is_not_idle():
    """The driver's figures stand beside the memory. A simulated card has none."""
    world = snapshot(lease("kernel", 4, "cuda:0", kind="kernel"), simulated=False)
    waits = Ticket("k", ME.id, "use", "qwen", NOW - 7, NOW, need=(Share("cuda:0", GIB),))
    found = shown(replace(world, tickets=(waits,)))
    assert [one["busy"] for one in found["devices"]] == ["37 %", ""]
    assert found["groups"][0]["waits"] == round(world.wall - 7)
    assert shown(snapshot())["devices"][0]["busy"] == ""
    assert [one["pcie"] for one in found["devices"]] == ["", ""], "not counted"
    view = world.devices[0]
    counted = replace(view, sample=replace(view.sample, pcie=(3 * GIB, 20 * 2**20)))
    assert shown(replace(world, devices=(counted,)))["devices"][0]["pcie"] == (
        "PCIe 3.0 GiB/s in, 20.0 MiB/s out"
    )


def test_waiting_requests_are_counted_and_listed():
    """The wait of a stopped process cannot be ended. A notebook of this server can be opened."""
    found = shown(snapshot(lease("qwen", 14), tickets=[ticket()]))
    assert found["status"] == "sim:0 14/22 GiB · simulated · 1 waiting"
    [row] = found["waiting"]
    assert (row["name"], row["holder"], row["need"]) == ("llama", "analysis.ipynb", "8.0 GiB")
    assert row["since"] == WALL - 7 and found["problems"] == []
    assert row["actions"] == [{"verb": "cancel", "label": "End wait", "why_not": ""}]
    asleep = replace(ticket(), refreshed=NOW - 60)
    [row] = shown(snapshot(lease("qwen", 14), tickets=[asleep]))["waiting"]
    assert row["actions"][0]["why_not"].startswith("Its process is stopped")
    mine = replace(ticket(), owner=ME.id)
    [row] = shown(snapshot(lease("qwen", 14), tickets=[mine]))["waiting"]
    assert row["path"] == "notes/train.ipynb"


def test_another_ledger_is_mentioned_where_the_tile_shows_it():
    """The words appear only if the user would see other figures in the console."""
    world = snapshot(lease("qwen", 14))
    words = "sim:0 14/22 GiB · simulated · 2 ledgers are active"
    assert shown(world, others=[THERE], tile=THERE)["status"] == words
    assert shown(world, others=[THERE], tile=THERE)["tile"] == THERE.title
    assert shown(world, others=[THERE], tile=HERE)["status"] == "sim:0 14/22 GiB · simulated"


def test_a_stopped_process_with_memory_is_a_problem():
    assert shown(snapshot(lease("qwen", 21.6)))["problems"] == [], "a full card is none"
    world = snapshot(lease("qwen", 14))
    stopped = {ME.id: Presence(ProcessState.STOPPED)}
    found = shown(replace(world, presences=stopped))
    [problem] = found["problems"]
    assert problem["text"].startswith("train.ipynb (pid 4000) is stopped and holds 14.0 GiB.")
    assert (problem["since"], problem["before"]) == (WALL, True), "the first snapshot with it"
    continues = {"verb": "resume", "target": f"{ME.id}/", "label": "Continue", "why_not": ""}
    assert problem["actions"] == [continues]
    assert found["status"].endswith("1 problem") and found["groups"][0]["trouble"] == "stopped"
    assert "is stopped" in found["groups"][0]["why_not"], "its kernel acts on no interrupt either"
    [row] = found["groups"][0]["rows"]
    assert all("is stopped" in action["why_not"] for action in row["actions"])
    assert shown(replace(snapshot(), presences=stopped))["problems"] == []


def test_a_problem_has_buttons_that_may_help_and_those_that_a_stopped_process_ignores_are_disabled():
    """A long wait can be ended, and the pinned model that blocks it can be unpinned."""
    world = snapshot(lease("qwen", 14, keep=True), tickets=[ticket(waited=400.0)])
    [problem] = shown(world)["problems"]
    assert (problem["since"], problem["before"]) == (WALL - 400, False)
    assert [(one["verb"], one["target"], one["label"]) for one in problem["actions"]] == [
        ("unpin", f"{ME.id}/qwen", "Unpin qwen"), ("cancel", "k", "End wait"),
    ]  # fmt: skip
    asleep = {ME.id: Presence(ProcessState.STOPPED)}
    stopped, first_seen = replace(snapshot(lease("qwen", 14)), presences=asleep), FirstSeen()
    for later in (0.0, 60.0):
        seen = shown(replace(stopped, wall=WALL + later), first_seen=first_seen)
        assert seen["problems"][0]["since"] == WALL
    asleep = replace(ticket(waited=400.0), refreshed=NOW - 60)
    world = snapshot(lease("qwen", 14, keep=True), tickets=[asleep])
    stopped = replace(world, presences={ME.id: Presence(ProcessState.STOPPED)})
    [continued, wait] = shown(stopped)["problems"]
    assert [one["why_not"] for one in continued["actions"]] == [""]
    unpin, end = wait["actions"]
    assert "is stopped" in unpin["why_not"] and "cannot end its wait" in end["why_not"]


def test_a_kernel_can_be_interrupted_unless_it_runs_no_cell():
    """The button asked nothing and said that no cell runs *any more*. A script of a cell says neither."""
    world = snapshot(lease("qwen", 14))
    for cell, why in (
        ({"busy_since": NOW - 9}, ""),
        ({"idle_since": NOW - 9}, "It runs no cell"),
        ({}, ""),
    ):
        section = replace(world.sections[ME.id], **cell)
        [group] = shown(replace(world, sections={ME.id: section}))["groups"]
        assert group["why_not"] == why


def test_rows_are_grouped_by_notebook_with_the_largest_first():
    world = snapshot(lease("bge", 2, owner=BOB), lease("qwen", 4), lease("llama", 8))
    groups = shown(world)["groups"]
    assert [(one["title"], one["bytes"]) for one in groups] == [
        ("train.ipynb", "12.0 GiB"), ("analysis.ipynb", "2.0 GiB"),
    ]  # fmt: skip
    assert [(row["name"], row["where"], row["bytes"]) for row in groups[0]["rows"]] == [
        ("llama", "sim:0", "8.0 GiB"), ("qwen", "sim:0", "4.0 GiB"),
    ]  # fmt: skip
    assert groups[0]["rows"][0]["idle"] == WALL - 12 and groups[1]["user"] == "bob"
    opened = [(one["path"], one["kernel"]) for one in groups]
    assert opened == [("notes/train.ipynb", "k1"), ("", "")], "only a kernel of this server"
    found = shown(snapshot(lease("away", 3, HOST), lease("bge", 2, owner=BOB)))["groups"]
    assert [one["bytes"] for one in found] == ["2.0 GiB", "3.0 GiB in RAM"]


def test_each_row_has_the_action_that_is_possible_and_says_why_it_is_not():
    world = snapshot(
        lease("idle", 4),
        lease("used", 3, pins=1, pinned_since=NOW - 40),
        lease("kernel", 2, kind="kernel"),
        lease("away", 1, HOST),
        lease("kept", 0.5, keep=True),
        lease("engine", 0.2, HOST, backend="vllm"),
    )
    rows = shown(world)["groups"][0]["rows"]
    assert [(row["name"], [tuple(one.values()) for one in row["actions"]]) for row in rows] == [
        ("idle", [("evict", "Evict", "")]),
        ("used", [("evict", "Evict", "In use by train.ipynb (pid 4000)")]),
        ("its own code", [("park", "Park", "")]),
        ("kept", [("evict", "Evict", "It is pinned; unpin it first"), ("unpin", "Unpin", "")]),
        ("away", [("restore", "Restore", "")]),
        ("engine", [("restore", "Restore", "")]),
    ]
    assert [row["variables"] for row in rows] == [False, False, True, False, False, False]
    assert rows[4]["where"] == "RAM" and rows[3]["state"] == "pinned"
    assert [row["state"] for row in rows[4:]] == ["", "asleep"]


def test_an_idle_model_on_a_disk_says_so_in_its_row():
    """It has no place: a model that is only at its source is on disk too, and has no row."""
    stowed = lease("reranker", 4, HOST, disk_bytes=4 * GIB, last_used=NOW - 40)
    [row] = shown(snapshot(stowed))["groups"][0]["rows"]
    assert (row["where"], row["state"], row["idle"] is not None) == ("", "on disk", True)
    for beside, size in (
        ((), "4.0 GiB on disk"),
        ((lease("warm", 2, HOST),), "2.0 GiB in RAM"),
        ((lease("warm", 2, HOST), lease("here", 1)), "1.0 GiB"),
        ((replace(lease("parts", 1), shares=(Share("sim:0", GIB), Share(HOST, GIB))),), "1.0 GiB"),
    ):
        assert shown(snapshot(stowed, *beside))["groups"][0]["bytes"] == size


def test_no_shown_text_has_a_control_character_or_changes_with_time_alone():
    """Every tab of the browser would get a new answer every second."""
    world = snapshot(lease("evil\x1b[2J<b>", 4), tickets=[ticket("a\x00b")])
    found = json.loads(json.dumps(shown(world)))
    [row] = found["groups"][0]["rows"]
    assert row["name"] == "evil\ufffd[2J<b>" and found["waiting"][0]["name"] == "a\ufffdb"
    world = snapshot(lease("qwen", 4), lease("kernel", 2, kind="kernel"))
    later = replace(world, now=NOW + 1.0, wall=WALL + 1.0)
    assert shown(later) == shown(world)


def test_the_variables_of_a_notebook_are_listed_without_its_models():
    records = [
        {"name": "w", "kind": "variable", "bytes": GIB, "alone_bytes": 0, "cell": "In [2]"},
        {"name": "qwen", "kind": "model", "bytes": GIB, "alone_bytes": 0, "cell": ""},
    ]
    frame = SimpleNamespace(attrs={"note": "names of ann only"}, to_dict=lambda _: records)
    row = {"name": "w", "kind": "variable", "bytes": "1.0 GiB", "frees": "0 B", "cell": "In [2]"}
    assert view.variables(frame) == {"rows": [row], "note": "names of ann only"}
