"""`who` for another process, through the ledger. Only its own user gets names of variables."""

import pytest
import torch

from gpu_runtime import Busy, GpuError, NotAllowed
from gpu_runtime.facts import HOST
from gpu_runtime.ledgers.liveness import Sight
from gpu_runtime.ledgers.memory import MemoryLedger
from gpu_runtime.notebook import Activity
from gpu_runtime.owner import holdings, maintenance, requests
from gpu_runtime.owner.holdings import MOST_LETTERS, MOST_ROWS
from gpu_runtime.scheduler import recall
from gpu_runtime.scheduler.recall import Order
from gpu_runtime.settings import Settings
from gpu_runtime.units import MIB

from .conftest import loaded
from .test_kernel import Quiet


@pytest.fixture
def pair(runtime, shared_book, clock):
    """A runtime that asks, and a kernel that runs no cell now."""
    asks = runtime(ledger=shared_book, monitor=False)
    other = runtime(ledger=shared_book)
    activity = Activity(clock)
    activity.ended("a cell")
    other._session.activity = activity
    return asks, other


def table(frame):
    return {row["name"]: row["bytes"] // MIB for row in frame.to_dict("records")}


def test_another_process_lists_what_it_holds_and_its_answer_is_not_on_the_page(pair):
    asks, other = pair
    loaded(other, qwen="4GiB")
    me = other._session.me
    before = other._session.ledger.read().sections[me].leases
    frame = asks.who(me)
    assert table(frame)["qwen"] == 4096
    assert frame.attrs["process"] == other._session.owner.label and frame.attrs["note"] == ""
    after = asks._session.ledger.read()
    assert after.sections[me].leases == before and not after.tickets
    assert [event.action for event in after.events[-2:]] == ["asked", "who"]
    assert "4.0 GiB on devices" in after.events[-1].because


def test_an_own_process_by_its_own_id_needs_no_request(runtime):
    rt = loaded(runtime(), qwen="4GiB")
    assert table(rt.who(rt._session.me))["qwen"] == 4096


def test_while_a_cell_runs_its_variables_are_not_searched(pair, monkeypatch):
    """A search counts references, which a running cell would change. So only the models are listed."""
    asks, other = pair
    loaded(other, qwen="4GiB")
    other._session.activity.began("a cell")
    monkeypatch.setattr(holdings, "search_here", pytest.fail)
    frame = asks.who(other._session.me)
    assert table(frame) == {"qwen": 4096} and frame.attrs["note"] == holdings.BUSY


def test_a_search_ends_when_a_cell_begins(pair, monkeypatch):
    asks, other = pair
    stops = []

    def who(session, stop):
        other._session.activity.began("a cell")
        stops.append(stop())
        return holdings.Holdings(())

    monkeypatch.setattr(holdings, "search_here", who)
    loaded(other, qwen="4GiB")
    asks.who(other._session.me)
    assert stops == [True]


def test_a_script_lists_its_leases(pair):
    asks, other = pair
    other._session.activity.forget()
    loaded(other, qwen="4GiB")
    assert asks.who(other._session.me).attrs["note"] == holdings.SCRIPT


def test_a_parked_kernel_answers_and_stays_parked(pair):
    asks, other = pair
    loaded(other, qwen="4GiB")
    kernel = other.attach_kernel(Quiet())
    kept = torch.zeros(8 * MIB // 4)
    kernel.begin(), kernel.end(), kernel.catch_up()
    other.park()
    frame = asks.who(other._session.me)
    assert frame.attrs["parked_bytes"] >= 8 * MIB and frame.attrs["held_bytes"] == 4096 * MIB
    places = dict(zip(frame["name"], frame["device"], strict=True))
    assert places.pop("qwen") == "sim:0" and set(places.values()) <= {HOST}
    lease = asks.status().sections[other._session.me].lease("kernel")
    assert lease.on_host
    del kept


def test_names_are_for_the_own_user_unless_the_setting_says_all(pair):
    """Another user, such as an operator, gets only what the book has: figures and the names of models."""
    _, other = pair
    session = other._session
    mine = holdings.Holder
    rows = (
        mine("secret", "variable", "sim:0", 5, 5, "In [1]", "Tensor"),
        mine("m", "model", "sim:0", 3, 3),
    )
    found = holdings.Holdings(rows, 8, 8)
    hidden = holdings._without_names(found, "ann")
    assert [row.name for row in hidden.holders] == ["–", "m"]
    assert "secret" not in str(hidden) and "Tensor" not in str(hidden)
    assert [row.bytes for row in hidden.holders] == [5, 3] and "ann" in hidden.note
    published = []
    session.ledger.publish_answer = lambda asker, answer, private: published.append(
        (answer, private)
    )
    holdings._listed_for_others, before = (lambda _: found), holdings._listed_for_others
    try:
        for by, names in (("ops", "own"), ("ops", "all"), (session.ledger.owner.user, "own")):
            session.settings = Settings(gpu_who_names=names)
            holdings.answer(session, Order("k", "who", "", by=by, asker="a"))
    finally:
        holdings._listed_for_others = before
    shown = [("secret" in str(answer), private) for answer, private in published]
    assert shown == [(False, False), (True, False), (True, True)]


def test_the_answer_is_bounded():
    many = tuple(
        holdings.Holder("x" * 1000, "variable", "sim:0", 1, 1, "", "y" * 1000)
        for _ in range(MOST_ROWS + 5)
    )
    short = holdings._shortened(holdings.Holdings(many))
    assert (len(short.holders), short.left_out, short.left_out_bytes) == (MOST_ROWS, 5, 5)
    assert max(len(row.name) + len(row.what) for row in short.holders) == 2 * MOST_LETTERS


# -- no answer -------------------------------------------------------------------------------------
def test_a_process_that_is_not_there_is_refused_with_those_that_are(pair):
    asks, other = pair
    loaded(other, qwen="4GiB")
    with pytest.raises(GpuError, match="no process 'gone.ipynb' shares this ledger.*pid"):
        asks.who("gone.ipynb")


def test_a_stopped_process_is_named_at_once(pair, monkeypatch):
    asks, other = pair
    loaded(other, qwen="4GiB")
    monkeypatch.setattr(MemoryLedger, "sights", lambda *_: {other._session.me: Sight.STOPPED})
    with pytest.raises(GpuError, match=r"is stopped, so it cannot answer.\n.*kill -CONT"):
        asks.who(other._session.me)


def test_a_process_that_is_stopped_while_it_is_asked_is_named_as_stopped(
    runtime, shared_book, monkeypatch
):
    asks, other = (runtime(ledger=shared_book, monitor=False) for _ in range(2))  # none answers
    loaded(other, qwen="4GiB")
    seen = iter([Sight.ALIVE])
    monkeypatch.setattr(
        MemoryLedger, "sights", lambda *_: {other._session.me: next(seen, Sight.STOPPED)}
    )
    with pytest.raises(GpuError, match="is stopped, so it cannot answer"):
        holdings.who(asks._session, other._session.me, 0.2)


def test_a_process_of_an_older_version_does_not_answer(pair, monkeypatch):
    """It does not know the request, which is removed when the requesting process stops waiting."""
    asks, other = pair
    loaded(other, qwen="4GiB")
    monkeypatch.setattr(maintenance, "obey", lambda session: ())
    with pytest.raises(Busy, match="has not answered for 0 s.*too old"):
        holdings.who(asks._session, other._session.me, 0.2)
    assert not asks._session.ledger.read().tickets


def test_another_users_process_is_asked_by_operators_only(pair, monkeypatch):
    asks, other = pair
    loaded(other, qwen="4GiB")
    owner = asks._session.ledger.read().owner(other._session.me)
    because = recall.foreign("eve", "who", "", owner)
    assert because.startswith("eve may not ask which variables hold memory in ")
    monkeypatch.setattr(requests, "refusal_of_request", lambda *_: because)
    with pytest.raises(NotAllowed, match="only .* or an operator may"):
        asks.who(other._session.me)


def test_a_command_without_a_name_says_what_to_type(runtime):
    rt = runtime()
    rt.guest = True
    with pytest.raises(GpuError, match="gpu who NOTEBOOK"):
        rt.who()
