"""The hub's configuration, the roles of its users, and what the culler leaves alone. Without a hub."""

import json
import os
import pwd
import sys

import pytest
from traitlets.config import Config

from gpu_runtime import hub
from gpu_runtime.errors import BadSetting, GpuError
from gpu_runtime.facts import Lease, Owner, Section, Share
from gpu_runtime.ledgers.reader import OpenLedger
from gpu_runtime.units import MIB


def services(c):
    return {one["name"]: one for one in hub._value(c.JupyterHub, "services", [])}


def roles(c):
    return {one["name"]: one for one in hub._value(c.JupyterHub, "load_roles", [])}


def test_one_line_gives_the_console_parking_and_a_culler(monkeypatch):
    monkeypatch.setenv("GPU_CONFIG_FILE", "/srv/config.toml")
    c = Config()
    hub.configure(c, operator_groups=["gpu-admins", "staff"])
    console, culler = services(c)["gpu"], services(c)["gpu-culler"]
    assert console["command"] == [
        sys.executable,
        "-m",
        "gpu_runtime.cli",
        "console",
        "--no-browser",
    ]
    assert console["url"] == "http://127.0.0.1:8210"
    assert console["environment"]["GPU_CONSOLE_OPERATOR_GROUPS"] == "gpu-admins,staff"
    assert culler["command"] == [sys.executable, "-m", "gpu_runtime.hub", "--timeout=86400"]
    for one in (console, culler):
        assert one["environment"]["GPU_CONFIG_FILE"] == "/srv/config.toml"
    assert c.Spawner.environment == {"GPU_PARK": "idle", "GPU_PARK_IDLE_SECONDS": "1800"}
    assert roles(c)["user"]["scopes"] == ["self", "access:services!service=gpu"]
    assert roles(c)["gpu-culler"]["services"] == ["gpu-culler"]


def test_a_disk_takes_what_is_parked_for_long():
    c = Config()
    hub.configure(c, park_dir="/scratch/parked", hibernate_after="2 h", cull_after=None)
    assert c.Spawner.environment == {
        "GPU_PARK": "idle",
        "GPU_PARK_IDLE_SECONDS": "1800",
        "GPU_PARK_DIR": "/scratch/parked",
        "GPU_HIBERNATE_SECONDS": "7200",
    }


def test_what_the_file_has_already_stays():
    c = Config()
    c.Spawner.environment = {"A": "1"}
    c.JupyterHub.services.append(
        {"name": "mine", "url": "http://127.0.0.1:1"}
    )  # the hub's usual way
    c.JupyterHub.load_roles = [
        {"name": "user", "scopes": ["self", "x"]},
        {"name": "mine", "scopes": []},
    ]
    hub.configure(c, park_after=None, cull_after=None)
    assert c.Spawner.environment == {"A": "1"}
    assert list(services(c)) == ["mine", "gpu"]
    assert roles(c)["user"]["scopes"] == ["self", "x", "access:services!service=gpu"]
    assert list(roles(c)) == ["user", "mine"]


@pytest.mark.parametrize(
    "command",
    [
        [
            "/opt/tljh/hub/bin/python3",
            "-m",
            "jupyterhub_idle_culler",
            "--timeout=600",
            "--cull-users",
        ],
        ["jupyterhub-idle-culler", "--timeout=600", "--cull-users"],
        ["/usr/bin/jupyterhub-idle-culler", "--timeout=600", "--cull-users"],
    ],
)
def test_a_culler_that_exists_keeps_its_rules_and_there_is_no_second_one(command):
    """As in The Littlest JupyterHub, which configures one by itself."""
    c = Config()
    c.JupyterHub.services = [
        {"name": "cull-idle", "command": command, "environment": {"GPU_X": "own"}}
    ]
    hub.configure(c, cull_unsaved=True, user_names="jupyter-{name}", environment={"GPU_X": "1"})
    assert list(services(c)) == ["cull-idle", "gpu"]
    culler = services(c)["cull-idle"]
    expected = ["-m", "gpu_runtime.hub", "--cull-unsaved", "--timeout=600", "--cull-users"]
    assert culler["command"] == [sys.executable, *expected]
    assert culler["environment"] == {"GPU_X": "own", "GPU_CONSOLE_USER_NAMES": "jupyter-{name}"} | {
        name: value
        for name, value in culler["environment"].items()
        if name.startswith("GPU_") and name != "GPU_X"
    }


def test_names_without_a_place_for_the_user_are_refused():
    """Otherwise all visitors would be one user of the machine."""
    with pytest.raises(BadSetting, match="jupyter-{name}"):
        hub.configure(Config(), user_names="jovyan")


@pytest.mark.parametrize("model, member", [
    ({"name": "ops", "admin": True}, ""),
    ({"name": "ops", "admin": "yes"}, "u-ops"),
    ({"name": "ann", "admin": False, "groups": ["students"]}, "u-ann"),
    ({"name": "eve", "groups": ["students", "staff"]}, ""),
    ({"name": "bob"}, "u-bob"),
])  # fmt: skip
def test_operators_are_the_hubs_admins_and_the_members_of_the_named_groups(model, member):
    found = hub.visitor(model, {"staff"}, "u-{name}")
    assert (found.name, found.member, found.may_act) == (model["name"], member, True)
    assert not hub.visitor(model, {"staff"}, read_only=True).may_act


def held(name, user, server="", kind="kernel", device="host", **more):
    owner = Owner("box", "boot", 7, 8, user=user, notebook=f"/home/{user}/{name}", server=server)
    lease = Lease(owner.id, kind, shares=(Share(device, 8 * MIB),), kind=kind, **more)
    return Section(owner, (lease,))


def test_a_server_stays_while_values_exist_only_in_the_memory_of_its_notebooks():
    unsaved = hub.unsaved_in([
        held("train.ipynb", "u-ann"),
        held("tune.ipynb", "u-ann", device="sim:0"),
        held("other.ipynb", "u-ann", server="fast"),
        held("files.ipynb", "u-bob", kind="model", droppable=True),
        held("block.ipynb", "u-bob", kind="block"),
    ])  # fmt: skip
    assert unsaved("u-ann", "") == "train.ipynb, 8.0 MiB; tune.ipynb, 8.0 MiB"
    assert unsaved("u-ann", "fast") == "fast/other.ipynb, 8.0 MiB"
    assert unsaved("u-bob", "") == unsaved("u-ann", "other") == "", (
        "their sources have the same bytes"
    )


@pytest.mark.parametrize("wrap", [list, lambda users: {"items": users, "_pagination": {}}])
def test_the_culler_reads_a_pending_action_of_a_server_that_stays(wrap):
    unsaved = hub.unsaved_in([held("train.ipynb", "u-ann")])
    users = [
        {"name": "ann", "servers": {"": {"pending": None}, "fast": {"pending": None}}},
        {"name": "bob", "servers": {"": {"pending": "stop"}}},
        {"name": "eve"},
    ]
    marked = hub.marked(wrap(json.loads(json.dumps(users))), unsaved, "u-{name}")
    items = marked["items"] if isinstance(marked, dict) else marked
    assert items[0]["servers"]["fast"] == {"pending": None} and items[1:] == users[1:]
    assert (
        items[0]["servers"][""]["pending"]
        == "memory that exists nowhere else (train.ipynb, 8.0 MiB)"
    )
    assert hub.marked({"version": "6.1"}, unsaved) == {"version": "6.1"}


def test_a_ledger_that_cannot_be_read_keeps_every_server(monkeypatch):
    def fails(self):
        raise GpuError("the ledger\ndoes not answer")

    monkeypatch.setattr(hub.Ledgers, "_look", fails)
    assert hub.Ledgers().unsaved()("anybody", "") == "not known: the ledger does not answer"


def test_a_ledger_that_does_not_answer_keeps_the_servers_of_its_users_only(monkeypatch):
    """Otherwise one stuck process of anybody would keep all servers."""
    found = [held("train.ipynb", "ann")], {"bob": "not known"}
    monkeypatch.setattr(hub.Ledgers, "_look", lambda self: found)
    unsaved = hub.Ledgers().unsaved()
    assert [unsaved(user, "") for user in ("ann", "bob", "eve")] == [
        "train.ipynb, 8.0 MiB",
        "not known",
        "",
    ]


def test_a_ledger_whose_url_cannot_be_opened_is_one_that_does_not_answer(tmp_path):
    """The URL is in the environment of any user's process. It kept the servers of all users."""
    assert hub._book(OpenLedger("redis://box:port/0", tmp_path)) is None


def test_a_private_ledger_that_names_another_user_keeps_nobodys_server():
    mine, claimed = held("mine.ipynb", "eve"), held("claimed.ipynb", "ann")
    users = {mine.owner.pid: "eve"}
    assert hub.proven([mine, claimed], users) == [mine]
    assert hub.proven([mine], {}) == [], "its process has ended"


def test_the_user_of_a_process_is_the_systems_answer():
    assert hub.users_of([os.getpid(), 2**30]) == {os.getpid(): pwd.getpwuid(os.getuid()).pw_name}
