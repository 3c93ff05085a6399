"""The fleet on a real Ray cluster: three hosts on this machine, with simulated cards.

The tests share one cluster and run in this order. The last ones kill what the others need.
"""

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import gpu_runtime
from gpu_runtime import (
    DoesNotFit,
    FleetUnavailable,
    NodeLost,
    Runtime,
    StillInUse,
    UnknownDevice,
    UnknownModel,
    cli,
)
from gpu_runtime.backends.processes.engine import MOST_RESTARTS
from gpu_runtime.backends.processes.orphan_guard import descendants
from gpu_runtime.facts import PlanLevel
from gpu_runtime.fleet import client, cluster
from gpu_runtime.scheduler.offers import likeliest_first
from tests.browser.chromium import CHROMIUM, BrowserPage, running
from tests.clock import PATIENCE, until
from tests.faces.served import OPERATORS, free_port, serving
from tests.fleet.ray_cluster import ENVIRONMENT, Hosts, started, write_models

MODELS = {"seventy": 70, "thirty": 30, "small": 4, "colossus": 500}
HOSTS = {
    "box1": ("sim:2x80GiB,host:1GiB", 2),
    "box2": ("sim:2x40GiB,host:1GiB", 2),
    "box3": ("sim:1x40GiB,host:1GiB", 1),
}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with started(tmp_path_factory.mktemp("fleet"), HOSTS) as found:
        yield found


@pytest.fixture(scope="module")
def fleet(hosts: Hosts) -> Any:
    found = gpu_runtime.fleet(hosts.cluster.address)
    file = write_models(hosts.directory / "models.yaml", MODELS)
    assert found.apply(file, copies=0) == dict.fromkeys(MODELS, "on request")
    return found


@pytest.fixture
def empty(fleet: Any, hosts: Hosts) -> Any:
    """The fleet with open hosts, the wishes for MODELS on request, no slot and no loaded model.

    An earlier test that failed may have left other wishes.
    """
    for host in hosts.nodes.keys() - set(fleet.hosts()):
        hosts.join(host)
    for slot in fleet._wishes().slots:
        fleet.delete_slot(slot.id)
    for host in fleet._wishes().drained:
        if host in fleet.hosts():
            fleet.drain(host, undo=True)
    fleet.apply(write_models(hosts.directory / "models.yaml", MODELS), copies=0)
    for host in fleet.hosts():
        for name in fleet.host(host).models()["name"]:
            if name in MODELS:
                fleet.host(host).evict(name)
    return fleet


def held_by(fleet: Any, host: str) -> list[str]:
    """The names of the models on the cards of `host`."""
    table = fleet.host(host).leases()
    return sorted(table[table["device"] != "host"]["model"])


def gpu(*words: str) -> int:
    return cli.main(["fleet", *words])


def test_a_model_goes_to_the_host_that_holds_it_on_one_card(empty):
    offers = empty.plan("seventy")
    assert [offer.host for offer in offers if offer.level is not PlanLevel.NEVER] == ["box1"]
    with empty.use("seventy") as model:
        assert model.host == "box1"
        assert model("answer") == "answer", "the call runs on the host"
    assert held_by(empty, "box1") == ["seventy"]


def test_every_host_tells_its_room(empty):
    """If a fleet has more than eight hosts, all hosts are asked for their room. Then the best eight make a plan."""
    rooms, missing = empty._hosts.ask("room", "thirty", 0, group="offers", hosts=empty.hosts())
    assert not missing and sorted(rooms) == ["box1", "box2", "box3"]
    assert [len(rooms[host].free_bytes) for host in sorted(rooms)] == [2, 2, 1]
    assert all(room.need_bytes == 30 << 30 and not room.here for room in rooms.values())
    assert likeliest_first(rooms.values()) == ("box2", "box3", "box1")


def test_a_host_that_became_busy_is_passed_over(empty, hosts, monkeypatch, caplog):
    """Between the offer and the request, a notebook fills the best host. The next host serves."""
    choose = empty._choose

    def choose_then_fill(name: str) -> Any:
        """The offers; then a notebook takes all cards of the best host."""
        found = choose(name)
        order.extend(offer.host for offer in found[0])
        devices, cards = HOSTS[order[0]]
        held = Runtime(devices=devices, ledger=hosts.ledger(order[0]))
        notebooks.append(held)
        for _ in range(cards):
            size = "72 GiB" if order[0] == "box1" else "36 GiB"
            blocks.append(held.lease(size, purpose="training"))
            blocks[-1].__enter__()
        return found

    order: list[str] = []  # the hosts, the best first
    notebooks: list[Runtime] = []
    blocks: list[Any] = []
    monkeypatch.setattr(empty, "_choose", choose_then_fill)
    try:
        with caplog.at_level(logging.INFO, "gpu_runtime"):
            with empty.use("thirty", timeout=PATIENCE) as model:
                assert model.host == order[1]
    finally:
        for notebook in notebooks:
            blocks.clear()
            notebook.close()
    logged = [record.getMessage() for record in caplog.records if "attempt" in record.getMessage()]
    assert logged == [
        f"thirty: attempt 1/3 on {order[0]} (room)",
        f"thirty: attempt 2/3 on {order[1]} (room)",
    ]


def test_a_model_that_fits_nowhere_is_refused_by_every_host_by_name(empty):
    """No host evicts anything for it."""
    with empty.use("small") as model:
        host = model.host
    with pytest.raises(DoesNotFit) as refused, empty.use("colossus"):
        pass
    assert all(f"{name}: colossus needs 500" in str(refused.value) for name in HOSTS)
    assert refused.value.need_bytes == 500 << 30
    assert held_by(empty, host) == ["small"]
    with pytest.raises(UnknownModel, match="Did you mean seventy"):
        empty.use("sevnty").__enter__()


def test_a_notebook_changes_the_offers_of_its_host_and_recalls_the_idle_model(empty, hosts):
    """In the host's book, the fleet is one more owner of leases. Its idle model leaves for a notebook."""
    with empty.use("seventy") as model:
        assert model.host == "box1"
    with Runtime(
        devices=HOSTS["box1"][0], ledger=hosts.ledger("box1"), eviction_grace_seconds=0.0
    ) as notebook:
        with notebook.lease("72 GiB", purpose="a"), notebook.lease("72 GiB", purpose="b"):
            [offer] = [one for one in empty.plan("seventy") if one.host == "box1"]
            assert offer.level in (PlanLevel.WAIT, PlanLevel.NEVER)
            assert held_by(empty, "box1").count("seventy") == 0
    recalled = [event for event in empty.why("seventy")["box1"] if event.action == "unloaded"]
    assert recalled[0].reason == "recall" and "needs room for b" in recalled[0].because


def where(fleet: Any, name: str) -> list[str]:
    """The hosts that have the model on a card or in memory."""
    return [host for host in fleet.hosts() if name in fleet.host(host).leases()["model"].values]


def apply(fleet: Any, hosts: Hosts, *names: str, **how: Any) -> dict[str, str]:
    file = write_models(hosts.directory / "some.yaml", {name: MODELS[name] for name in names})
    return fleet.apply(file, **how)


def test_copies_are_spread_over_hosts_and_calls_over_copies(empty, hosts):
    assert apply(empty, hosts, "small", copies=2) == {"small": ", ".join(where(empty, "small"))}
    assert len(where(empty, "small")) == 2
    with empty.use("small") as one, empty.use("small") as other:
        assert sorted((one.host, other.host)) == where(empty, "small")
    apply(empty, hosts, "small", copies=0)


def test_a_dedicated_set_is_replaced_and_the_largest_model_is_placed_first(empty, hosts):
    told = apply(empty, hosts, "small", "seventy", dedicated=True)
    assert list(told) == ["seventy", "small"] and told["seventy"] == "box1"
    # Of box2 and box3, the host on which a load took a second less is chosen.
    assert apply(empty, hosts, "thirty", dedicated=True)["thirty"] in ("box2", "box3")
    assert where(empty, "seventy") == where(empty, "small") == []
    apply(empty, hosts, *MODELS, copies=0)
    with empty.use("seventy"), pytest.raises(UnknownModel):
        empty.delete("nobody")


def test_a_host_plans_and_loads_the_models_that_are_wished_now(empty, hosts):
    """Its runtime still knows a model whose wish was removed; and a new one it has not read yet."""
    empty.apply(write_models(hosts.directory / "new.yaml", {"new": 1}), copies=0)
    assert empty.host("box3").preload("new").done
    empty.delete("new")
    assert empty.host("box3").evict("new", drop=True).done
    with pytest.raises(UnknownModel, match=r"Its wish was removed. Add it again:  fleet.apply"):
        empty.host("box3").preload("new")
    empty.host("box1").preload("small")
    assert empty.host("box1").plan("small").level is PlanLevel.HERE
    empty.delete("small")
    with pytest.raises(UnknownModel, match=r"Its wish was removed. Add it again:  fleet.apply"):
        empty.host("box1").plan("small")
    assert empty.host("box1").plan("14 GiB").level is PlanLevel.ROOM, "a size is no model"
    apply(empty, hosts, "small", copies=0)
    assert empty.host("box1").plan("small").level is PlanLevel.HERE


def test_a_host_is_known_at_once_and_its_methods_are_listed(empty):
    with pytest.raises(FleetUnavailable, match="no host is called 'nohost'. The fleet has box1,"):
        empty.host("nohost")
    far = empty.host("box1")
    assert repr(far) == "<Runtime of box1>" and "hosts: box1, box2" in repr(empty)
    with pytest.raises(AttributeError, match="box1 has no 'register' here. It has: status,"):
        far.register("qwen")


def slots(fleet: Any) -> list[tuple[Any, ...]]:
    return list(fleet.slots()[["slot", "device", "active", "wished"]].itertuples(index=False))


def test_a_slot_is_on_its_cards_again_after_its_agent_was_killed(empty, hosts, capsys):
    """Although the best fit would be another card."""
    assert gpu("slots", "--create", "small@box1", "--on", "sim:1") == 0
    assert "small is on sim:1 of box1" in capsys.readouterr().out
    with empty.use("small") as model:
        assert model.host == "box1"
        assert slots(empty) == [("small@box1", "sim:1", 1, True)]
        for act in (
            lambda: empty.create_slot("small", "box1", "sim:0"),
            lambda: empty.evict("small"),
        ):
            with pytest.raises(StillInUse, match="in use by the agent of box1"):
                act()
    empty.create_slot("small", "box1", "sim:0")
    assert slots(empty) == [("small@box1", "sim:0", 0, True)]
    with pytest.raises(DoesNotFit):
        empty.create_slot("colossus", "box1", "sim:0")
    with pytest.raises(UnknownDevice, match="sim:7"):
        empty.create_slot("small", "box1", "sim:7")
    os.kill(hosts.agent_pid("box1"), signal.SIGKILL)
    until(lambda: ("small@box1", "sim:0", 0, True) in slots(empty), "the slot is filled again")
    assert gpu("slots", "--delete", "small@box1") == 0
    assert gpu("slots") == 0
    assert slots(empty) == []


def test_the_verb_shows_one_bar_for_each_host(empty, hosts, capsys):
    """A model on two cards is one segment."""
    with empty.use("seventy"):
        assert gpu("--address", hosts.cluster.address) == 0
    lines = capsys.readouterr().out.splitlines()
    bars = [line for line in lines if line.startswith("box")]
    assert [line.split()[0] for line in bars] == ["box1", "box2", "box3"]
    assert "70.0 GiB of 160 GiB" in bars[0] and "2 cards, simulated" in bars[0]
    assert "seventy 70.0 GiB" in lines[1]


def test_a_host_leaves_and_joins_again(empty, hosts, capsys):
    """The commands act on the machine on which they are typed, here box1."""
    assert gpu("leave") == 0
    assert empty.hosts() == ("box2", "box3")
    assert gpu("join", "--name", "box1", "--devices", "cuda") == 1
    assert "no CUDA card that is visible here" in capsys.readouterr().err
    devices, _ = HOSTS["box1"]
    words = ("--name", "box1", "--devices", devices, "--ledger", hosts.ledger("box1"))
    assert gpu("join", *words) == 0
    assert "box1 has joined the fleet" in capsys.readouterr().out
    with empty.use("seventy") as model:
        assert model.host == "box1"


@pytest.mark.parametrize(("words", "said"), [
    (("drain", "nobox"), "no host is called 'nobox'. The fleet has box1, box2, box3"),
    (("drain",), "needs the name of a host"),
])  # fmt: skip
def test_a_wrong_action_is_one_line(empty, hosts, capsys, words, said):
    assert gpu(*words) == 1
    assert said in capsys.readouterr().err
    assert empty.hosts() == ("box1", "box2", "box3")


def test_no_agent_joins_a_cluster_without_a_token(hosts, monkeypatch):
    """Everybody who reaches such a cluster could run code on every host."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(FleetUnavailable, match="RAY_AUTH_MODE"):
        client.join(name="box4", devices="sim:24GiB")


def test_a_host_of_the_fleet_that_joins_again_stays_as_it_is(empty, hosts, monkeypatch):
    node = hosts.nodes["box1"].node_id
    for other in ({"name": "box9"}, {"devices": "sim:9GiB"}, {"ledger": "keeper:///elsewhere"}):
        with pytest.raises(FleetUnavailable, match="already: as box1, with sim:2x80GiB"):
            client.join(node=node, address=hosts.address, **other)
    again = client.join(node=node, address=hosts.address)
    assert again.because == f"box1 has joined the fleet, with {hosts.devices['box1']}"
    monkeypatch.setattr(cluster, "versions", lambda: {"gpu-console": "0.4.0"})
    with pytest.raises(FleetUnavailable, match="an agent of other versions: box1"):
        client.join(node=node, address=hosts.address)
    assert empty.hosts() == ("box1", "box2", "box3")


def test_other_versions_are_refused_by_name():
    theirs = cluster.versions() | {"Python": "3.9"}
    with pytest.raises(FleetUnavailable, match="box7 has other versions: Python 3.9, not 3"):
        cluster.require_equal_versions(theirs, "box7")


USE_AND_WAIT = """
with fleet.use("thirty") as model:
    print(model.host, flush=True)
    input()
"""


def leave_open(fleet: Any, *hosts: str) -> None:
    """Drains all other hosts. The measured seconds of earlier loads choose among open hosts."""
    for host in set(fleet.hosts()) - set(hosts):
        fleet.drain(host)


def pins(fleet: Any, host: str) -> int:
    return int(fleet.host(host).leases()["pins"].sum())


def test_the_pins_of_a_killed_driver_end(empty, hosts):
    """Detached agents outlive drivers, so they watch Ray's table of jobs."""
    driver = hosts.client(USE_AND_WAIT)
    assert driver.stdout is not None
    host = driver.stdout.readline().strip()
    assert pins(empty, host) == 1
    driver.kill()
    driver.wait()
    until(lambda: not pins(empty, host), "the pin of the dead driver ends")


BUSY_THREADS = """
import threading
import ray

def free():
    while kept:
        kept.pop()

kept = [ray.put(0) for _ in range(20_000)]
freeing = threading.Thread(target=free)
freeing.start()
fleet.close()
freeing.join()
fleet = gpu_runtime.fleet(ADDRESS)

def ask():
    try:
        while True:
            fleet.status()
    except gpu_runtime.GpuError as error:
        print(str(error).splitlines()[0], flush=True)

for ending in ("close", "close", "exit"):
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    fleet.status()
    if ending == "close":
        fleet.close()
        for thread in threads:
            thread.join()
        fleet = gpu_runtime.fleet(ADDRESS)
"""


def test_a_fleet_is_closed_while_other_threads_ask_it(empty, hosts):
    """Ray freed memory that its calls in other threads still read: SIGSEGV."""
    driver = hosts.client(BUSY_THREADS.replace("ADDRESS", repr(hosts.address)))
    printed, _ = driver.communicate()
    assert driver.returncode == 0
    assert printed.count("this process has left the fleet.") >= 12


def test_a_killed_model_keeps_its_card_three_times_and_then_is_used_elsewhere(empty, hosts):
    leave_open(empty, "box3")
    rival = Runtime(devices=HOSTS["box3"][0], ledger=hosts.ledger("box3"))
    with empty.use("thirty", retry=True) as model:
        empty.drain("box2", undo=True)
        assert model.host == "box3"
        block = rival.lease("30GiB", timeout=PATIENCE)
        waiting = threading.Thread(target=block.__enter__)
        waiting.start()
        until(lambda: rival.status().tickets, "the rival waits")
        for count in range(MOST_RESTARTS + 1):
            *_, program = descendants(hosts.agent_pid("box3"))
            os.kill(program, signal.SIGKILL)
            until(lambda gone=program: gone not in descendants(hosts.agent_pid("box3")), "its end")
            assert model(count) == count
            assert model.host == ("box3" if count < MOST_RESTARTS else "box2")
            assert waiting.is_alive() or count == MOST_RESTARTS
        waiting.join(PATIENCE)
        assert [lease.kind for lease in rival.status().leases()] == ["block"]
    rival.close()


def test_a_killed_controller_loses_nothing(empty):
    """The controller stores only the wishes for models. Ray starts it again and repeats its calls."""
    before = empty._ask_controller("wishes")
    pid = empty._ask_controller("ready", cluster.versions())
    for number in range(20):
        if number == 5:
            os.kill(pid, signal.SIGKILL)
        with empty.use(("small", "thirty")[number % 2]) as model:
            assert model(number) == number
    assert empty.plan("small")[0].level is PlanLevel.HERE
    assert empty._ask_controller("ready", cluster.versions()) != pid
    assert empty._ask_controller("wishes") == before


@pytest.fixture(scope="module")
def console(fleet, hosts):
    """The page of `gpu console --fleet` in Chromium."""
    pytest.importorskip("playwright")
    if not shutil.which(CHROMIUM):
        pytest.skip("needs Chromium")
    port = free_port()
    words = [sys.executable, "-m", "gpu_runtime.cli", "console", "--no-browser"]
    words += ["--fleet", hosts.address, "--port", str(port)]
    settings = ENVIRONMENT | {"GPU_CONSOLE_TOKEN": OPERATORS}
    with serving(words, hosts.directory, settings, port=port), running() as browser:
        yield BrowserPage(browser, f"http://127.0.0.1:{port}/?token={OPERATORS}")


def test_the_console_acts_on_the_host_that_was_chosen(empty, console):
    """box1 and box3 have a model of the same name. The link leads to box3 with its tab in front."""
    for host in ("box1", "box3"):
        empty.host(host).preload("small")
    console.ready().tab("Models")
    console.page.get_by_role("link", name="box3").and_(
        console.page.locator("[href*=Models]")
    ).click()
    console.page.wait_for_function("() => location.search.includes('host=box3')")
    console.ready().row("small", "agent of box3").get_by_role("button", name="Evict").click()
    console.page.get_by_text("The agent of box3 does this.").wait_for()
    console.page.get_by_role("button", name="Evict, freeing 4.0 GiB").click()
    until(lambda: held_by(empty, "box3") == [], "box3 evicts its copy")
    assert held_by(empty, "box1") == ["small"]
    assert (console.errors, console.elsewhere) == ([], [])


def test_a_model_answers_elsewhere_after_its_node_was_killed(empty, hosts):
    leave_open(empty, "box3")
    with empty.use("thirty") as model:
        assert model.host == "box3"
    empty.drain("box2", undo=True)
    with empty.use("thirty", retry=True) as again, empty.use("thirty") as once:
        assert (again.host, once.host) == ("box3", "box3")
        hosts.kill("box3")
        with pytest.raises(NodeLost) as lost:
            once("first")
        assert (lost.value.name, lost.value.host) == ("thirty", "box3")
        assert again("second") == "second"
        assert again.host == "box2"
    until(lambda: empty.hosts() == ("box1", "box2"), "the dead host is no longer listed")


def test_the_console_greys_the_figures_of_a_host_that_is_gone(hosts, console):
    """The page of the dead host stays, and its links lead to the other hosts."""
    if "box3" in hosts.nodes:
        hosts.kill("box3")
    console.page.get_by_text("box3 does not answer.").wait_for()
    console.page.locator("tr", has_text="no answer since").locator(".g-old").first.wait_for()
    console.page.get_by_role("link", name="box1").click()
    console.ready().page.get_by_text("box3 does not answer.").wait_for(state="detached")
    assert (console.errors, console.elsewhere) == ([], [])


def test_an_agent_that_is_stopped_is_noticed_although_its_node_lives(empty, hosts, monkeypatch):
    leave_open(empty, "box2")
    assert apply(empty, hosts, "small", copies=1) == {"small": "box2"}
    monkeypatch.setattr(cluster, "SIGN_SECONDS", 0.2)
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 2.0)
    agent = hosts.agent_pid("box2")
    os.kill(agent, signal.SIGSTOP)
    try:
        with pytest.raises(NodeLost, match="box2 was lost: no answer within 2 s"):
            empty.evict("small@box2", timeout=1)
    finally:
        os.kill(agent, signal.SIGCONT)


def test_a_frozen_host_is_replaced_and_holds_nothing_when_it_wakes(empty, hosts):
    """A node that was declared dead ends when it runs again."""
    leave_open(empty, "box2")
    assert apply(empty, hosts, "small", copies=1) == {"small": "box2"}
    with empty.use("thirty", retry=True) as model:
        assert model.host == "box2"
        empty.drain("box1", undo=True)
        wake = hosts.freeze("box2")
        try:
            assert model("words") == "words"
            assert model.host == "box1"
            until(lambda: where(empty, "small") == ["box1"], "the wished model moves")
        finally:
            wake()
    with Runtime(devices=HOSTS["box2"][0], ledger=hosts.ledger("box2")) as notebook:
        with notebook.lease("36 GiB", timeout=PATIENCE), notebook.lease("36 GiB", timeout=PATIENCE):
            assert {lease.kind for lease in notebook.status().leases()} == {"block"}
