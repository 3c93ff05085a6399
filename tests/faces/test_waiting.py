"""A cell shows a line while its model waits. The line is removed when the model is loaded."""

import itertools
import re
import threading
from types import SimpleNamespace

import pytest
from gpu import parking
from gpu.waiting import Line, OthersWait, WaitLine, sentence
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

import gpu_runtime
from gpu_runtime import Busy, LoadFailed, Runtime, verbs
from gpu_runtime.facts import HOST, Candidate, Share, Ticket, Wait
from gpu_runtime.notebook import Activity
from gpu_runtime.owner.arrivals import LOADING, RESTORING, Arrival
from gpu_runtime.rendering import answers
from gpu_runtime.units import GIB, show_bytes
from tests.clock import until

from . import samples

NEED = (Share("sim:0", GIB),)
WAIT = Wait(
    "llama (14.0 GiB on cuda:0) is in use by train.ipynb (pid 4121) for 3 min",
    ahead=2,
    considered=(Candidate((Share("cuda:0", 12 * GIB),), False, ""),),
)


def test_the_line_has_the_need_the_holder_the_place_in_the_queue_and_what_to_type():
    """The waiting notebook itself runs no other cell, so the command is one of a terminal."""
    assert sentence("qwen", WAIT, 7.0) == (
        "You have waited 7.0 s for qwen (12.0 GiB on cuda:0). llama (14.0 GiB on cuda:0) is in use by "
        "train.ipynb (pid 4121) for 3 min. You are 3rd in the queue. All holders, in a terminal:  gpu status"
    )
    two = Candidate((Share("sim:0", 20 * GIB), Share("sim:1", 20 * GIB)), False, "")
    split = Wait("llama is in use", considered=(two,))
    assert " for giant (40.0 GiB on sim:0,1). llama" in sentence("giant", split, 7.0)
    wait = Wait("llama is in use")
    assert sentence("kernel", wait, 90.0).startswith(
        "You have waited 90 s for this notebook's own memory. llama is in use. "
    )
    assert " for cell. llama is in use. All" in sentence("cell#3", wait, 2.0)
    *_, command = sentence("kernel", WAIT, 7.0).partition(":  ")
    program, verb = command.split()
    assert program == verbs.CLI and verb in {one.name for one in verbs.verbs(verbs.CLI)}


@pytest.mark.parametrize(("ahead", "turn"), [
    (0, ""), (1, "2nd"), (3, "4th"), (10, "11th"), (11, "12th"), (20, "21st"), (22, "23rd"),
    (100, "101st"), (110, "111th"), (112, "113th"),
])  # fmt: skip
def test_the_place_in_the_queue_is_an_ordinal(ahead, turn):
    shown = sentence("qwen", Wait("llama is in use", ahead=ahead), 7.0)
    assert (f"You are {turn} in the queue." in shown) is (ahead > 0) is ("queue" in shown)


class Shown(list):
    """What a line shows, instead of a notebook or a terminal. A line that stays ends with a dot."""

    visible = False

    def show(self, line, html=""):
        if line or self.visible:
            self.append(line)
        self.visible = bool(line)

    def keep(self, line):
        self.append(line + ".")
        self.visible = False


@pytest.fixture
def shown(monkeypatch):
    """All lines of one test, in order."""
    shown = Shown()
    monkeypatch.setattr("gpu.waiting.Line", lambda notebook: shown)
    return shown


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def next_cell(monkeypatch):
    """Begins the next cell of the notebook."""
    seconds = itertools.count(1.0)
    cells = Activity(lambda: next(seconds))
    monkeypatch.setattr("gpu.waiting.activity", cells)

    def begin():
        cells.forget()
        cells.began("a cell")

    return begin


@pytest.fixture
def line(shown, now):
    return WaitLine(notebook=False, progress_seconds=600.0, clock=lambda: now[0])


def wait(line, now, name, seconds):
    line(name, WAIT)
    now[0] += seconds
    line(name, WAIT)
    line(name, None)


def arrive(line, name, seconds, verb=LOADING, failed=False, size=42 * 10**9):
    arrival = Arrival(name, verb, size, 0.0)
    line.arrival(arrival)
    arrival.seconds, arrival.failed, arrival.ended = seconds, failed, True
    line.arrival(arrival)


def test_a_long_wait_has_a_line_which_becomes_the_line_of_the_load(line, now, shown, next_cell):
    wait(line, now, "qwen", 0.5)
    assert shown == [], "a short wait shows nothing"
    next_cell()
    wait(line, now, "qwen", 1.5)
    assert shown[-2:] == [sentence("qwen", WAIT, 1.5), ""]
    next_cell()
    wait(line, now, "qwen", 12.0)
    arrive(line, "qwen", 20.0)
    assert shown[-1] == "qwen: waited 12 s, loaded in 20 s (2.1 GB/s)."
    arrive(line, "llama", 700.0, failed=True)
    assert shown[-1] == "llama: loading stopped after 12 min."


def test_of_a_load_that_is_long_enough_one_line_stays(shown):
    line = WaitLine(notebook=False, progress_seconds=0.5)
    arrive(line, "qwen", 0.4)
    arrive(line, "qwen", 0.5, RESTORING, size=10**9)
    assert shown == ["qwen: restored in 500 ms (2.0 GB/s)."]


@pytest.mark.parametrize(("pause", "counted"), [(0.25, "4.2 s"), (0.5, "1.0 s"), (60.0, "1.0 s")])
def test_a_wait_that_is_begun_again_goes_on_counting(line, now, shown, pause, counted, next_cell):
    """A cell waits for the room of last time, then for its memory alone: the line began again at 0 s."""
    wait(line, now, "kernel", 3.0)
    now[0] += pause
    line("kernel", WAIT)
    now[0] += 1.0
    line("kernel", WAIT)
    assert shown[-1].startswith(f"You have waited {counted} for")
    line("kernel", None)
    next_cell()
    wait(line, now, "kernel", 2.0)
    assert shown[-2].startswith("You have waited 2.0 s for")


def test_a_wait_after_a_load_is_counted_from_zero(line, now, shown):
    """The load is the end of the first wait, and its line has been kept. Another model's wait is not added."""
    wait(line, now, "qwen", 3.0)
    arrive(line, "qwen", 700.0)
    assert shown[-1].startswith("qwen: waited 3.0 s, loaded in 12 min")
    wait(line, now, "qwen", 2.0)
    assert shown[-2].startswith("You have waited 2.0 s for qwen")
    now[0] += 60
    wait(line, now, "qwen", 0.25)  # too short to be shown
    arrive(line, "qwen", 700.0)
    assert shown[-1].startswith("qwen: loaded in 12 min"), "the earlier wait is not of this load"
    wait(line, now, "kernel", 3.0)
    wait(line, now, "llama", 12.0)
    assert shown[-2].startswith("You have waited 12 s for llama")
    arrive(line, "qwen", 700.0)
    assert shown[-1].startswith("qwen: loaded in 12 min")
    arrive(line, "kernel", 700.0, RESTORING)
    assert shown[-1] == ".", "a notebook's return has another line, of the owner"


def test_a_load_is_drawn_until_it_has_ended(shown):
    """Another thread draws, so that a load that reports nothing shows its progress too."""
    line = WaitLine(notebook=False, progress_seconds=0.0)
    arrival = Arrival("qwen", LOADING, 4 * GIB, 0.0)
    arrival(2 * GIB, 4 * GIB)
    line.arrival(arrival)
    until(lambda: shown)
    arrival.ended = True
    line.arrival(arrival)
    drawn = len(shown)
    assert shown[0].startswith(f"loading qwen  {'█' * 16}{'·' * 16}  2.0 GiB of 4.0 GiB · ")
    assert shown[0].endswith(" left · Ctrl-C stops it") and drawn == len(shown)


def test_a_return_is_drawn_as_a_whole(line, shown):
    """Three quarters of the model may have returned while room was made for the rest."""
    arrival = Arrival("qwen", RESTORING, 4 * GIB, 8.0)
    words = f"restoring qwen  {'█' * 8}{'·' * 24}  4.0 GiB · 6.0 s left"
    assert answers.running(arrival, 2.0, "").text == words
    assert answers.seconds_left(arrival, 9.0) is None  # it takes longer this time
    arrival = Arrival("qwen", RESTORING, 4 * GIB, 8.0, earlier_seconds=6.0)
    line.arrival(arrival)
    line._redrawing.draw()
    words = f"restoring qwen  {'█' * 24}{'·' * 8}  4.0 GiB · 2.0 s left · Ctrl-C stops it"
    assert shown[-1] == words
    arrival.seconds, arrival.ended = 8.0, True
    line.arrival(arrival)
    assert shown[-1] == "qwen: restored in 8.0 s (537 MB/s)."


def test_a_runtime_tells_of_loads_and_restores_but_not_beside_a_callers_own_function(rt):
    heard = []
    rt.tell_waits(None, lambda one: heard.append((one.verb, one.ended, one.failed)))
    rt.register("qwen", backend="fake", size="4GiB")
    rt.preload("qwen")
    rt.evict("qwen")
    with rt.use("qwen"):
        pass
    rt.evict("qwen")
    rt.restore("qwen", progress=lambda done, total: None)
    rt.register("broken", backend="fake", size="1GiB", fails=True)
    with pytest.raises(LoadFailed):
        rt.preload("broken")
    assert heard == [
        (LOADING, False, False), (LOADING, True, False), (RESTORING, False, False),
        (RESTORING, True, False), (LOADING, False, False), (LOADING, True, True),
    ]  # fmt: skip


@pytest.fixture
def runtimes():
    """Two runtimes of one ledger. Their clock advances each time when it is read, so no wait takes long."""
    ticks = itertools.count(1000.0, 2.0)
    book = {"devices": "sim:24GiB,host:64GiB", "ledger": "memory:waiting", "monitor": False}
    made = [Runtime(**book, clock=lambda: next(ticks)) for _ in "ab"]
    yield made
    for rt in made:
        rt.close()


def test_the_holder_hears_once_that_another_process_waits(runtimes):
    """The line names who waits, for how long and for what, what is in the way, and what to type."""
    holder, asker = runtimes
    holder.register("llama", backend="fake", size="14GiB")
    holder.preload("llama")
    asker._session.notebook = "/work/analysis.ipynb"
    others, heard = OthersWait(), []
    asker.tell_waits(lambda name, wait: heard.append(others.news(holder.status())))
    with holder.use("llama"), pytest.raises(Busy), asker.lease("12GiB", timeout=40):
        pass
    (line,) = filter(None, heard)
    assert re.fullmatch(
        r"analysis.ipynb \(pid \d+\) has waited [\d.]+ s for 12.0 GiB on sim:0; "
        r"llama holds 14.0 GiB there. To let it in:  %gpu evict llama",
        line,
    )


OWNERS, PLACES = (samples.ME, samples.BOB), ("sim:0", "sim:1", HOST)
KINDS = st.sampled_from(("model", "kernel", "block"))
HELD = st.tuples(st.sampled_from(OWNERS), st.sampled_from(PLACES), st.integers(1, 3), KINDS)


@example(held=[(samples.ME, "sim:1", 3, "model"), (samples.ME, "sim:0", 1, "model")])
@example(held=[(samples.ME, "sim:0", 1, "kernel"), (samples.BOB, "sim:0", 3, "model")])
@given(held=st.lists(HELD, max_size=5))
def test_the_news_are_of_the_largest_lease_of_this_notebook_on_the_card(held):
    """Another process may hold more there, and this notebook may hold more elsewhere."""
    leases = [
        samples.lease(f"m{n}", gib + n / 8, device, owner, kind=kind)
        for n, (owner, device, gib, kind) in enumerate(held)
    ]
    one = Ticket("k", samples.BOB.id, "use", "llama", samples.NOW - 9, samples.NOW, need=NEED)
    news = OthersWait().news(samples.snapshot(*leases, cards=2, gib=80, tickets=[one]))
    mine = [x for x in leases if x.owner == samples.ME.id and x.bytes_on("sim:0")]
    if not mine:
        assert news == ""
        return
    largest = max(mine, key=lambda lease: lease.bytes)
    end = {"kernel": "%gpu park", "model": f"%gpu evict {largest.name}", "block": " there."}
    assert f"holds {show_bytes(largest.bytes)} there." in news
    assert news.endswith(end[largest.kind])


REQUEST = Ticket("k", samples.BOB.id, "use", "llama", samples.NOW - 9, samples.NOW, need=NEED)
BY = {True: samples.ME.id, False: samples.BOB.id}
LOOKS = st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from((4.9, 5.0)))


@given(st.lists(st.lists(LOOKS, max_size=4, unique_by=lambda look: look[:2]), max_size=8))
def test_a_notebook_hears_once_of_each_request_of_another_and_never_of_its_own(looks):
    """Requests that wait together are told together."""
    others, told = OthersWait(), set()
    for look in looks:
        requests = [
            replace(REQUEST, key=f"{own}{n}", owner=BY[own], arrived=samples.NOW - waited)
            for own, n, waited in look
        ]
        new = {f"{own}{n}" for own, n, waited in look if not own and waited >= 5.0} - told
        news = others.news(samples.snapshot(samples.lease("qwen", 14), tickets=requests))
        several = f"and {len(new) - 1} more has" in news
        assert bool(news) is bool(new) and several is (len(new) > 1)
        told |= new


@pytest.mark.parametrize(("gpu_progress_seconds", "lines"), [("0s", 1), ("10m", 0)])
def test_a_setting_decides_which_loads_show_a_line(
    shell, shown, monkeypatch, gpu_progress_seconds, lines
):
    book = {"devices": "sim:24GiB", "ledger": "memory:", "monitor": False}
    rt = Runtime(**book, gpu_progress_seconds=gpu_progress_seconds)
    monkeypatch.setattr(gpu_runtime, "runtime", lambda: rt)
    with rt:
        shell.run_cell("rt.register('qwen', backend='fake', size='4GiB')\nrt.preload('qwen')")
    assert len([line for line in shown if line.startswith("qwen: loaded in ")]) == lines


class Terminal(list):
    write = list.append

    def isatty(self):
        return True

    def flush(self):
        pass


def test_in_a_terminal_the_line_is_overwritten_and_the_last_one_stays(monkeypatch, capsys):
    """Nothing is written to a stream that is no terminal."""
    line = Line(notebook=False)
    line.keep("qwen: loaded in 2 s")
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    line.show("qwen waits")
    line.keep("qwen: loaded in 2 s")
    assert terminal == ["\rqwen waits\x1b[K", "\rqwen: loaded in 2 s\x1b[K", "\n"]


def test_in_a_notebook_a_line_is_changed_in_place_until_it_stays(monkeypatch):
    made = []

    def display(bundle, **_):
        made.append([bundle["text/plain"]])
        return SimpleNamespace(update=lambda new, **_: made[-1].append(new["text/plain"]))

    monkeypatch.setattr("IPython.display.display", display)
    line = Line(notebook=True)
    for text in ("", "qwen waits", "qwen still waits"):
        line.show(text)
    line.keep("qwen: loaded in 2 s")
    line.show("llama waits")
    line.show("")
    assert made == [["qwen waits", "qwen still waits", "qwen: loaded in 2 s"], ["llama waits", ""]]


def test_a_limit_of_the_system_is_told_once_and_a_defect_is_raised(monkeypatch):
    told = []
    monkeypatch.setattr(parking, "quiet_line", told.append)
    monkeypatch.setattr(parking, "_told", set())
    in_words = lambda error: str(error) if isinstance(error, OSError) else None
    monkeypatch.setattr(parking, "in_one_sentence", in_words)
    full = OSError("no space is left")

    @parking.hook
    def act(error):
        """What IPython calls before each cell."""
        raise error

    assert (act(full), act(full), told) == (None, None, ["no space is left"])
    with pytest.raises(ZeroDivisionError):
        act(ZeroDivisionError())


def test_waits_and_loads_of_other_threads_show_nothing(shown):
    line = WaitLine(notebook=False, progress_seconds=0.0)
    for work in (lambda: line("qwen", WAIT), lambda: arrive(line, "qwen", 1.0)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert shown == []
