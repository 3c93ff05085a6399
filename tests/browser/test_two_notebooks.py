"""The story of the README: two notebooks of plain torch code on one card, in a real JupyterLab.

No cell uses `rt`. The simulated card has room for one of the two notebooks.
"""

import json
import os
import time
from contextlib import contextmanager

import pytest

from gpu_runtime import Runtime
from gpu_runtime.facts import HOST
from tests.clock import until

from .lab import LabNotebook, serving_lab

pytestmark = pytest.mark.timeout(600)

DEVICES = "sim:48MiB,host:2GiB"
NAMES = ("train.ipynb", "tune.ipynb")
SOAK = bool(os.environ.get("SOAK"))
TRAINING = """import json, torch
torch.manual_seed({seed})
weights = torch.randn({shape}, requires_grad=True)
optimizer = torch.optim.Adam([weights])
losses = []
def step():
    loss = (weights * torch.linspace(0, 1, 2048)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())"""
SHAPE = "1024, 2048"  # 8 MiB, and 24 MiB of gradients and state
STEP = "for _ in range(2): step()"
ROUNDS = 3
SIZES = (0, 8 << 20, 32 << 20)  # bytes after the first cell, after TRAINING and after each STEP


def alone(seed: int) -> list[float]:
    """The losses of a training that has the card for itself."""
    here: dict[str, object] = {}
    exec(TRAINING.format(seed=seed, shape=SHAPE), here)
    for _ in range(ROUNDS):
        exec(STEP, here)
    return here["losses"]


def held(rt: Runtime) -> dict[str, tuple[str, int, bool]]:
    """For each notebook: the place of its code's memory, the bytes, and whether it runs no cell."""
    return {
        section.owner.notebook.rsplit("/", 1)[-1]: (
            lease.where,
            lease.bytes,
            not section.busy_since,
        )
        for section in rt.status().sections.values()
        for lease in section.leases
        if lease.kind == "kernel"
    }


def settled(rt: Runtime, name: str = "", size: int = 0) -> bool:
    """Whether the notebook `name` is counted with `size` bytes, and nothing is about to move.

    Nothing is about to move if the claims on the card are within its limit, and no lease is in use or
    being moved. On a simulated card, the bytes of a cell may be counted a second after its end.
    """
    seen = rt.status()
    moving = any(lease.target or lease.pins for lease in seen.leases())
    card = seen.devices[0]
    counted = not size or (name in (now := held(rt)) and now[name][1] == size)
    return counted and not moving and card.claimed_bytes <= card.limit_bytes


def wait_until_settled(rt: Runtime, name: str = "", size: int = 0) -> None:
    """Waits until `settled`. If that does not happen, it fails, with the reasons in the journal."""
    try:
        until(lambda: settled(rt, name, size))
    except AssertionError:
        said = [event.because for event in rt.status().events]
        raise AssertionError("\n".join([f"{held(rt)}", *said])) from None


@contextmanager
def two(chromium, tmp_path, cells, **settings):
    """Both notebooks, open in JupyterLab, and a runtime that reads their ledger."""
    notebooks = {name: cells(number) for number, name in enumerate(NAMES)}
    settings = {"GPU_DEVICES": DEVICES, "EVICTION_GRACE_SECONDS": "0.2", **settings}
    with (
        serving_lab(tmp_path, notebooks, **settings) as port,
        Runtime(devices=DEVICES, ledger=f"keeper://{tmp_path}/ledger", monitor=False) as rt,
    ):
        opened = [LabNotebook(chromium, port, name) for name in NAMES]
        try:
            yield (*opened, rt)
        finally:
            for one in opened:
                one.close()


def test_two_notebooks_of_plain_code_take_turns_and_compute_as_if_alone(chromium, tmp_path):
    """The cells of the two notebooks run alternately. Both get the same losses as when they run alone."""

    def cells(number: int) -> list[str]:
        training = TRAINING.format(seed=number, shape=SHAPE)
        return ["%load_ext gpu", training, *([STEP] * ROUNDS), "print(json.dumps(losses))"]

    with two(chromium, tmp_path, cells) as (train, tune, rt):
        shown = ""
        for number in range(2 + ROUNDS):
            for notebook, name in zip((train, tune), NAMES, strict=True):
                shown += notebook.run(number)
                wait_until_settled(rt, name, SIZES[min(number, 2)])
        losses = [json.loads(one.run(2 + ROUNDS).splitlines()[-1]) for one in (train, tune)]
        places = {where for where, _, _ in held(rt).values()}
    assert losses == [alone(0), alone(1)]
    assert shown.count("came back from RAM") >= ROUNDS and "Error" not in shown
    assert places == {"sim:0", HOST}


# -- both notebooks run all their cells ------------------------------------------------------------

CELLS, CELL_SECONDS, SWAP_SECONDS, TURN_SECONDS = (
    (60, 1.0, 2.0, 30.0) if SOAK else (16, 0.5, 0.4, 4.0)
)
WORK = (
    f"began = time.time(); time.sleep({CELL_SECONDS}); x.add_(1); ran.append((began, time.time()))"
)
FIRST = "import json, time, torch, tests.browser.slow_copies\nx = torch.zeros(7_500_000); ran = []"
PAUSE_SECONDS = 0.5  # between two cells of one notebook; a longer one is a swap


def run_all_cells(number: int) -> list[str]:
    """The cells of a notebook that holds 28 MiB and works for a fixed time in each cell."""
    return [
        "%load_ext gpu",
        FIRST,
        *([WORK] * CELLS),
        "print(json.dumps([ran, float(x.min()), float(x.max())]))",
    ]


def swapping_seconds(ran: list[list[tuple[float, float]]]) -> float:
    """How long no cell of any notebook ran because memory left or returned.

    `ran` has the begin and the end of each cell of each notebook, in epoch seconds.
    """
    cells = sorted((*cell, number) for number, one in enumerate(ran) for cell in one)
    seconds, (_, end, last) = 0.0, cells[0]
    for began, ended, number in cells[1:]:
        if number != last or began - end > PAUSE_SECONDS:
            seconds += max(0.0, began - end)
        end, last = max(end, ended), number
    return seconds


def test_a_pause_at_a_change_of_notebooks_is_a_swap_and_a_short_one_between_two_cells_is_not():
    one, other = [(0.0, 1.0), (1.2, 2.0), (9.0, 9.5)], [(4.0, 5.0), (8.0, 8.8)]
    assert swapping_seconds([one, other]) == pytest.approx(2.0 + 3.0 + 0.2)


@pytest.mark.soak
def test_two_run_alls_share_the_card_in_turns(chromium, tmp_path):
    """Both notebooks run all their cells at the same time. Both advance, and each cell runs once.

    Exchanging the two notebooks takes SWAP_SECONDS. The test prints its figures. `make soak` runs it
    with more cells and longer swaps.
    """
    settings = {"SWAP_SECONDS": f"{SWAP_SECONDS}", "GPU_PARK_TURN_SECONDS": f"{TURN_SECONDS}"}
    with two(chromium, tmp_path, run_all_cells, **settings) as (train, tune, rt):
        for notebook in (train, tune):
            notebook.run(0), notebook.run(1)
            wait_until_settled(rt)
        began = time.monotonic()
        for notebook in (train, tune):
            notebook.command("notebook:run-all-below")
        most = 10 * (CELLS * CELL_SECONDS + 30)
        ends = [json.loads(one.output(2 + CELLS, most).splitlines()[-1]) for one in (train, tune)]
        wall = time.monotonic() - began
        actions = rt.events()
    ran = [end[0] for end in ends]
    assert [end[1:] for end in ends] == [[CELLS, CELLS]] * 2, "each cell ran once"
    starts, stops = [one[0][0] for one in ran], [one[-1][1] for one in ran]
    assert max(starts) < min(stops), "both advance: none waits until the other has ended"
    turns = int((actions.action == "offloaded").sum())
    abandoned = int(actions.reason.str.contains("used meanwhile").sum())
    span = max(stops) - min(starts)
    swapping = swapping_seconds(ran) / span
    print(
        f"wall {wall:.1f} s, {turns} turns, {abandoned} abandoned copies, swapping {swapping:.0%}"
    )
    assert turns >= 2 and abandoned <= turns
    if SOAK:
        assert swapping <= 0.2, f"swapping in {span:.0f} s"
