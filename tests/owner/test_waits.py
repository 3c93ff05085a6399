"""A person ends the wait of a request in the queue. The waiting cell gets an error with the name."""

import os
import threading
from contextlib import contextmanager

import pytest
from gpu_panels.acting import attempt
from gpu_panels.data.confirmations import propose
from gpu_panels.data.rows import queue
from msgspec.structs import replace

from gpu_runtime import AmbiguousName, GpuError, WaitEnded
from gpu_runtime.facts import Grant, LeaseId
from gpu_runtime.owner import acquire, operations, requests
from gpu_runtime.scheduler import recall
from tests.clock import PATIENCE, until

from .conftest import fakes

PID = os.getpid()


@pytest.fixture
def two(runtime, shared_book):
    """A runtime whose model is in use, and another one."""
    waiter, console = runtime(ledger=shared_book), runtime(ledger=shared_book)
    fakes(waiter, qwen="14GiB", llama="14GiB", phi="14GiB")
    with waiter.use("qwen"):
        yield waiter, console


@contextmanager
def waiting(rt, *names):
    """A thread waits for each of `names`. Yields their errors, complete when the `with` block has ended."""
    errors = []

    def wait(name):
        try:
            with rt.use(name, timeout=PATIENCE):
                pass
        except GpuError as error:
            errors.append(error)

    begun = threading.Semaphore(0)
    told = set()
    rt.tell_waits(lambda name, wait: name in told or told.add(name) or begun.release())
    threads = [threading.Thread(target=wait, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for _ in names:
        assert begun.acquire(timeout=PATIENCE)
    yield errors
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_another_process_ends_a_wait_and_the_waiter_is_told_by_whom(two):
    waiter, console = two
    with waiting(waiter, "llama") as errors:
        with console.on_behalf_of("ann, console"):
            done = console.cancel(f"llama@{PID}")
    [error] = errors
    assert done.done and done.verb == "cancel" and "llama" in done.because
    assert isinstance(error, WaitEnded) and error.by.startswith("ann, console (")
    assert (error.name, error.waited_seconds >= 0) == ("llama", True)
    assert "ended the wait for llama after" in str(error) and "qwen" in error.because
    book = console._session.ledger.read()
    assert book.tickets == () and book.lease(waiter._session.me, "llama") is None

    def journaled():
        """The waiter's process writes this event after it has ended the wait."""
        return [e for e in console._session.ledger.read().events if e.action == "cancel"]

    until(journaled)
    [ended] = journaled()
    assert (ended.model, ended.by) == ("llama", error.by)


def test_a_process_ends_a_wait_of_its_own(two, monkeypatch):
    """At once, and not at the next look into the book."""
    monkeypatch.setattr("gpu_runtime.owner.requests.POLL_SECONDS", 100 * PATIENCE)
    waiter, _ = two
    with waiting(waiter, "llama") as errors:
        assert waiter.cancel("llama").because == "the wait for llama was ended"
    assert [error.by for error in errors] == ["this process"]


def test_only_the_named_wait_ends(two):
    waiter, console = two
    with waiting(waiter, "llama", "phi") as errors:
        console.cancel("llama")
        left = [ticket.name for ticket in console._session.ledger.read().tickets]
        assert "phi" in left
        console.cancel(LeaseId(waiter._session.me, "phi"))
    assert sorted(error.name for error in errors) == ["llama", "phi"]


def test_a_notebook_is_named_by_its_file_and_several_waits_are_not_guessed(two):
    waiter, console = two
    waiter._session.notebook = "/home/ann/train.ipynb"
    with waiting(waiter, "llama", "phi") as errors:
        with pytest.raises(AmbiguousName, match=rf"llama@{PID}, phi@{PID}"):
            console.cancel("train.ipynb")
        console.cancel("phi@train.ipynb")
        console.cancel("llama")
    assert len(errors) == 2


def test_what_does_not_wait_is_refused_with_the_names_that_do(two):
    waiter, console = two
    with pytest.raises(GpuError, match=r"nothing waits for 'qwen'\. No request waits\."):
        console.cancel("qwen")
    with waiting(waiter, "llama"):
        with pytest.raises(GpuError, match=rf"These wait: llama@{PID}"):
            console.cancel("qwen")
        console.cancel("llama")
    with pytest.raises(GpuError, match="nothing waits for llama any more"):
        waiter.cancel(LeaseId(waiter._session.me, "llama"))


def test_another_user_needs_the_rights_of_an_operator(two, monkeypatch):
    """Every user may evict another user's idle model, but only operators may end another user's wait."""
    waiter, console = two
    with waiting(waiter, "llama") as errors:
        section = console._session.ledger.read().sections[waiter._session.me]
        owner = replace(section.owner, user="eve")
        mine = console._session.owner.user
        asker = requests.asker(console._session, mine)
        console._session.users[mine] = replace(asker, operator=False)
        because = requests.refusal_of_request(console._session, "cancel", owner, "llama")
        assert "may not ask to end its wait for llama" in because and "only eve or" in because
        # The owner itself checks the right too.
        askers = {mine: replace(asker, operator=False, at_home=False)}
        monkeypatch.setattr(
            requests,
            "askers",
            lambda session, book: {one.key: askers[mine] for one in book.tickets},
        )
        with pytest.raises(GpuError, match="only .* or an operator may"):
            console.cancel("llama")
        monkeypatch.undo()
        console.cancel("llama")
    assert isinstance(errors[0], WaitEnded)


def test_a_wait_that_begins_after_the_request_goes_on(two):
    """The person has named the wait that was shown, and not every later one."""
    waiter, console = two
    session, key = console._session, console._session.new_key("cancel")
    with waiting(waiter, "llama"):
        [later] = session.ledger.read().tickets
        earlier = replace(
            later, key=key.text, owner=session.me, verb="cancel", arrived=later.arrived - 1
        )
        session.transact(lambda book, world: (book.with_ticket(earlier), None))
        with pytest.raises(GpuError, match="nothing waits for llama any more"):
            operations.obey_cancel(
                waiter._session, recall.Order(key.text, "cancel", "llama", who="ann")
            )
        same = replace(earlier, arrived=later.arrived)
        session.transact(lambda book, world: (book.with_ticket(same), None))
        operations.obey_cancel(
            waiter._session, recall.Order(key.text, "cancel", "llama", who="ann")
        )


def test_a_click_on_end_wait_ends_the_wait_of_that_row(two):
    waiter, console = two
    with waiting(waiter, "llama") as errors:
        [row] = [row for row in queue(console.status()) if row.buttons]
        assert [(button.verb, button.label) for button in row.buttons] == [("cancel", "End wait")]
        proposal = propose("cancel", row.id, console.status())
        assert attempt(console, proposal, "ann, console")[0] == "done"
    assert errors[0].by.startswith("ann, console")
    state, words = attempt(console, proposal, "ann, console")
    assert state == "failed" and words == "Nothing waits for llama any more. Nothing was done."


def test_the_first_decision_after_a_death_grants_the_room(runtime, shared_book, monkeypatch):
    """It counted the bytes of the dead, and a second one had to follow. Both are transactions."""
    decided = []
    real = acquire._admitted
    monkeypatch.setattr(
        acquire, "_admitted", lambda *args: decided.append(real(*args)) or decided[-1]
    )
    waiter, holder = (runtime(ledger=shared_book, monitor=False) for _ in "ab")
    fakes(holder, qwen="14GiB")
    fakes(waiter, llama="14GiB")

    def dies(session, verdict, deadline):
        holder._session.ledger.close()  # without its section's removal
        decided.clear()

    monkeypatch.setattr(requests, "pause", dies)
    with holder.use("qwen"), waiter.use("llama", timeout=PATIENCE):
        pass
    assert [type(verdict) for verdict in decided] == [Grant]
