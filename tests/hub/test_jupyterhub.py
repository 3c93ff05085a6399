"""Real users of this machine with plain torch notebooks, in a real JupyterHub, on one simulated card.

The card is too small for both notebooks. The tests are one story: each begins where the one before has ended. Each
also runs alone, since it asks for what it needs of the earlier ones.
"""

import json
import os
import pwd
import re
import subprocess
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from gpu_runtime.facts import HOST
from tests.browser.chromium import serious
from tests.browser.test_two_notebooks import (
    ROUNDS,
    SHAPE,
    SIZES,
    STEP,
    TRAINING,
    wait_until_settled,
)
from tests.clock import PATIENCE, until
from tests.ledgers.people import run_command

from .box import ANN, BIN, BOB, OPS, Visitor

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

CELLS = ["%load_ext gpu", TRAINING, *([STEP] * ROUNDS), "print(json.dumps(losses))", "print(0)"]


def cells(seed):
    return [cell.format(seed=seed, shape=SHAPE) if cell == TRAINING else cell for cell in CELLS]


def alone(seed):
    """The losses of a training that has the card for itself, with the torch of the notebooks."""
    code = "\n".join(["import torch", *cells(seed)[1:-1]])
    words = [str(BIN / "python"), "-c", code]
    # A user's server has no variables of this process, such as the number of threads, which decides the last digit.
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={})
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rt(box):
    with box.runtime() as reading:
        yield reading


@pytest.fixture(scope="module")
def visitors(box, chromium):  # noqa: F811
    """Ann, bob and ops, who have logged in. Ann and bob have a server."""
    for number, user in enumerate((ANN, BOB)):
        box.start_server(user)
        box.write(user, {f"{user[:3]}.ipynb": cells(number)})
    found = {user: Visitor(chromium, box, user) for user in (ANN, BOB, OPS)}
    yield found
    for one in found.values():
        one.close()


@pytest.fixture(scope="module")
def opened(visitors):
    """The notebooks of ann and bob, open in their JupyterLab."""
    return {user: visitors[user].notebook(f"{user[:3]}.ipynb") for user in (ANN, BOB)}


@pytest.fixture
def trained(opened, rt):
    """The open notebooks, both of which hold memory of their own code."""
    for user, notebook in opened.items():
        if (user, "", f"{user[:3]}.ipynb") not in held(rt):
            for number in (0, 1):
                notebook.run(number)
            until(lambda user=user: (user, "", f"{user[:3]}.ipynb") in held(rt))
    return opened


def row(seen, notebook, user=""):
    """The row of a notebook or of a user's sum on the console. Problems and requests may name the notebook too."""
    title = seen.page.locator("td[data-title=Notebook]", has_text=re.compile(f"^{notebook}$"))
    return seen.row(user).filter(has=title)


def held(rt):
    """(user, server, notebook) -> the places of the memory of its own code."""
    rt.reap()
    return {
        (section.owner.user, section.owner.server, section.owner.file): lease.where
        for section in rt.status().sections.values()
        for lease in section.leases
        if lease.kind == "kernel"
    }


def test_two_users_take_turns_on_a_card_that_is_too_small_and_compute_as_if_alone(opened, rt):
    shown = ""
    for number in range(2 + ROUNDS):
        for user, notebook in opened.items():
            shown += notebook.run(number)
            # On a simulated card, the bytes of a cell may be counted a second after its end.
            wait_until_settled(rt, f"{user[:3]}.ipynb", SIZES[min(number, 2)])
    losses = [json.loads(one.run(2 + ROUNDS).splitlines()[-1]) for one in opened.values()]
    assert losses == [alone(0), alone(1)]
    totals = rt.status().totals
    assert min(totals["offloads"], totals["restorations"]) >= ROUNDS, "they took turns"
    assert "Error" not in shown
    assert set(held(rt)) == {(ANN, "", "ann.ipynb"), (BOB, "", "bob.ipynb")}


def test_an_open_tab_keeps_no_notebook_on_the_card_and_a_parked_one_is_not_active(box, trained, rt):
    """GPU_PARK_IDLE_SECONDS counts from the last cell, and the kernel does nothing that Jupyter counts as activity."""
    [kernel] = box.of_server(ANN, "kernels")
    until(lambda: set(held(rt).values()) == {HOST}, "both were parked")
    time_of_cell = kernel["last_activity"]
    assert trained[ANN].page.locator("text=/Python 3 .* Idle/").count()
    [kernel] = box.of_server(ANN, "kernels")
    assert kernel["last_activity"] == time_of_cell and kernel["execution_state"] == "idle"


def test_the_status_bar_the_panel_and_the_tile_work_below_the_prefix(visitors, trained):
    """Ann is no operator of the shared ledger, and her own tile does not call her one."""
    page = trained[ANN].page
    page.locator(".gpu-status", has_text=re.compile(r"sim:0 .*/43 MiB")).wait_for()
    page.locator(".gpu-status").click()
    page.get_by_role("button", name="Variables of ann.ipynb").wait_for()
    assert trained[ANN].seen.errors == [] and trained[ANN].seen.elsewhere == []
    tile = visitors[ANN].open(f"/user/{ANN}/gpu-console/").ready()
    tile.page.get_by_text(f"{ANN} · member").wait_for()
    tile.tab("Timeline")
    assert tile.errors == [] and tile.elsewhere == []
    tile.close()


def test_a_member_sees_the_own_notebooks_and_the_sum_of_each_other_user(visitors, trained):
    seen = visitors[ANN].open("/services/gpu").ready()  # also without the slash at the end
    seen.page.get_by_text(f"{ANN} · member").wait_for()
    assert row(seen, "ann.ipynb", ANN).count() == 1 and row(seen, "all notebooks", BOB).count() == 1
    assert seen.page.get_by_role("tab").all_inner_texts() == ["Now", "Models", "Leases", "Hours"]
    for tab in ("Hours", "Leases", "Models", "Now"):
        seen.tab(tab)
        assert "bob.ipynb" not in seen.page.content() and "operator" not in seen.page.content()
    assert row(seen, "all notebooks").locator("button").count() == 0
    assert seen.errors == [] and seen.elsewhere == [] and serious(seen.page) == []
    seen.close()


def test_a_member_acts_on_the_own_notebook(visitors, trained):
    trained[ANN].run(len(CELLS) - 1)
    seen = visitors[ANN].console()
    row(seen, "ann.ipynb").locator("button", has_text="Unpark").or_(
        row(seen, "ann.ipynb").locator("button", has_text="Park")
    ).first.click()
    seen.page.locator("[role=dialog]").get_by_role(
        "button", name=re.compile("^(Park|Unpark)")
    ).click()
    seen.page.locator(".outcome.done").wait_for()
    seen.close()


def test_an_operator_sees_everything_and_acts_on_it(visitors, trained, rt):
    seen = visitors[OPS].console()
    seen.page.get_by_text(f"{OPS} · operator").wait_for()
    for user in (ANN, BOB):
        assert row(seen, f"{user[:3]}.ipynb", user).count() == 1
    trained[BOB].run(1)
    row(seen, "bob.ipynb").locator("button", has_text=re.compile("^Park")).click()
    seen.page.locator("[role=dialog]").get_by_role("button", name=re.compile("^Park")).click()
    until(lambda: held(rt)[(BOB, "", "bob.ipynb")] == HOST)
    seen.close()


def test_a_group_of_the_setting_makes_operators(box, visitors):
    """And a page whose visitor has another role now is closed."""
    seen = visitors[BOB].console()
    seen.page.get_by_text(f"{BOB} · member").wait_for()
    box.api("groups/gpu-admins", "POST")
    box.api("groups/gpu-admins/users", "POST", {"users": [BOB]})
    seen.page.get_by_text("Reconnect").or_(seen.page.get_by_text("no update")).first.wait_for()
    seen.page.reload()
    seen.page.get_by_text(f"{BOB} · operator").wait_for()
    box.api("groups/gpu-admins", "DELETE")
    seen.close()


def test_nobody_gets_in_without_the_hub(box, visitors, chromium):  # noqa: F811
    """Neither a stranger, nor a token of the console, nor a token of the hub without access, nor a script."""
    place = f"{box.url}/services/gpu/"
    opener = urllib.request.build_opener(NoRedirect)

    def status(url, **headers):
        try:
            return opener.open(
                urllib.request.Request(url, headers=headers), timeout=PATIENCE
            ).status
        except urllib.error.HTTPError as error:
            return error.code

    assert status(place) == 302, "to the hub"
    assert status(place, Authorization="token nonsense") == 403
    assert status(f"{place}ws") == status(f"{place}static/js/bokeh.min.js") == 403
    assert status(f"{place}?token=nonsense") == 302
    page = visitors[ANN].open("/hub/home")
    for path in ("", "autoload.js?bokeh-autoload-element=x"):
        read = "(url) => fetch(url).then((answer) => answer.status)"
        assert page.page.evaluate(read, place + path) == 403, "a notebook is of the same origin"
    page.close()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def test_a_named_server_and_restarts_keep_their_names(box, visitors, trained, rt):
    """The ledger says user, server and notebook. What ended holds nothing."""
    box.start_server(ANN, "fast")
    fast = visitors[ANN].notebook("ann.ipynb", "fast")
    for number in (0, 1):
        fast.run(number)
    until(lambda: (ANN, "fast", "ann.ipynb") in held(rt))
    seen = visitors[OPS].console()
    row(seen, "fast/ann.ipynb", ANN).first.wait_for()
    seen.close()
    before = {section.owner.pid for section in rt.status().sections.values()}
    fast.command("notebook:restart-kernel")
    fast.page.locator(".jp-Dialog .jp-mod-accept").click()
    until(lambda: (ANN, "fast", "ann.ipynb") not in held(rt), "the restarted kernel holds nothing")
    fast.page.wait_for_selector("text=/Python 3 .* Idle/")
    fast.run(0), fast.run(1)
    until(lambda: (ANN, "fast", "ann.ipynb") in held(rt))
    [new] = {one.owner.pid for one in rt.status().sections.values() if one.owner.server} - before
    assert new
    fast.close()
    box.stop_server(ANN, "fast")
    until(lambda: (ANN, "fast", "ann.ipynb") not in held(rt), "the stopped server holds nothing")
    assert (ANN, "", "ann.ipynb") in held(rt), "the other server runs on"
    box.start_server(ANN, "fast")
    fast = visitors[ANN].notebook("ann.ipynb", "fast")
    fast.run(0), fast.run(1)
    until(lambda: (ANN, "fast", "ann.ipynb") in held(rt))
    fast.close()


def test_a_kernel_starts_and_leases_in_a_home_that_is_full(trained, rt):
    """The state directory is in the home. What cannot be written there is left out."""
    home = Path(pwd.getpwnam(BOB).pw_dir)
    if not home.is_mount():
        pytest.skip("this machine allows no mount, so no home can be made full")
    filler = home / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert not os.statvfs(home).f_bavail
    trained[BOB].command("notebook:restart-kernel")
    trained[BOB].page.locator(".jp-Dialog .jp-mod-accept").click()
    until(lambda: (BOB, "", "bob.ipynb") not in held(rt))
    shown = "".join(trained[BOB].run(number) for number in range(3))
    until(lambda: (BOB, "", "bob.ipynb") in held(rt))
    assert "Error" not in shown
    filler.unlink()


def test_the_culler_stops_idle_servers_but_none_with_values_that_exist_nowhere_else(
    box, trained, rt
):
    box.start_server(OPS)
    assert {user for user, _, _ in held(rt)} == {ANN, BOB}
    stay = [
        f"Not culling server {name} with pending memory that exists nowhere else"
        for name in sorted({f"{user}/{server}".rstrip("/") for user, server, _ in held(rt)})
    ]

    def others_stay(log):
        return all(text in log for text in stay)

    def is_stopped(user):
        return not (box.server(user) or {"ready": False})["ready"]

    log = box.culled("--timeout=0", until=lambda log: others_stay(log) and is_stopped(OPS))
    assert f"Culling server {ANN}" not in log and f"Culling server {BOB}" not in log
    assert not is_stopped(ANN) and not is_stopped(BOB)
    log = box.culled("--max-age=1", "--timeout=86400", until=others_stay)
    assert "Culling server" not in log, "the rule of the greatest age keeps them too"


def is_removed(box, user):
    """Asks the hub to remove `user`. It answers 400 while the user's server takes long to stop."""
    try:
        box.api(f"users/{user}", "DELETE")
    except urllib.error.HTTPError as error:
        assert error.code in (400, 404), error
        return error.code == 404
    return True


def test_a_user_is_removed_while_holding_memory(box, visitors, trained, rt):
    run_command("userdel", "-f", BOB)
    console = visitors[OPS].console()
    assert row(console, "bob.ipynb").count() == 1, (
        "the processes of a user who is gone are still there"
    )
    console.close()
    until(lambda: is_removed(box, BOB), "the hub has stopped the server and removed the user")
    until(lambda: not [user for user, _, _ in held(rt) if user == BOB], "the memory is free")
    seen = visitors[OPS].console()
    assert row(seen, "bob.ipynb").count() == 0 and row(seen, "ann.ipynb").count()
    seen.close()
    late = visitors[BOB].open("/services/gpu/")
    assert "GPU console" not in late.page.title()
    late.close()


def test_a_culler_that_may_lose_values_stops_all_idle_servers(box, visitors, rt):
    box.culled("--cull-unsaved", "--timeout=0", until=lambda log: not held(rt))
