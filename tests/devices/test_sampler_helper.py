"""The helper that measures the cards, and its readers, with a clock that the test sets. Its processes:
tests/stories/test_sampler.py.
"""

import os
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gpu_runtime.attribution import name_of
from gpu_runtime.devices import drivers, nvml, sampler_client
from gpu_runtime.devices.drivers import Card, Listing, NoAnswer
from gpu_runtime.devices.probe import Probe
from gpu_runtime.devices.sampler_client import (
    FRESH_SECONDS,
    LATE_SECONDS,
    Figures,
    Person,
    Sampling,
)
from gpu_runtime.facts import HOST, Device, Sample, encode
from gpu_runtime.telemetry import sampler
from gpu_runtime.units import GIB
from tests.clock import PATIENCE, Clock, until

NAMES = {"A": "cuda:0 (H200)", "B": "cuda:1 (H200)"}


def figures(began, cards=(), **more) -> Figures:
    """The figures of a round, with a sample of each of `cards` by UUID, taken at the given time."""
    samples = {uuid: Sample("", at, 5 * GIB) for uuid, at in dict(cards).items()}
    return Figures(1, began, Sample(HOST, began, 60 * GIB), samples, **more)


@pytest.fixture
def place(tmp_path):
    """Writes the figures that the helper publishes."""

    def publish(found: Figures):
        draft = tmp_path / "draft"
        draft.write_bytes(encode(found))
        draft.replace(tmp_path / "samples")

    return SimpleNamespace(path=tmp_path, publish=publish)


class Time(Clock):
    """The module `time`, whose sleeps end at once. `asleep` is called in each sleep."""

    CLOCK_BOOTTIME = 7

    def __init__(self) -> None:
        super().__init__()
        self.slept, self.asleep = 0.0, lambda: None

    def clock_gettime(self, _: int) -> float:
        return self.now

    time = monotonic = Clock.__call__

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)
        self.slept += seconds
        self.asleep()


@pytest.fixture
def clock(monkeypatch):
    found = Time()
    for module in (sampler_client, sampler):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def started(clock, monkeypatch):
    """When readers started helpers, none of which runs."""
    found = []

    def start(command, **_):
        os.utime(f"{command[-1]}/sampler.starting", (clock.now, clock.now))
        found.append(clock.now - 1000)
        return SimpleNamespace(poll=lambda: 0)

    monkeypatch.setattr(sampler_client.subprocess, "Popen", start)
    return found


# -- reading
def test_a_card_has_its_own_sample_and_none_while_it_does_not_answer():
    card, other = (Device(f"cuda:{n}", 8 * GIB, uuid=uuid) for n, uuid in enumerate("AB"))
    seen = figures(7.0, {"A": 6.0})
    assert seen.of(card) == Sample("cuda:0", 6.0, 5 * GIB) and seen.of(other) is None
    assert seen.of(Device(HOST, GIB)) is seen.host and seen.newest == 6.0
    for failed, blind in (({"A": "lost"}, [card]), ({"": "no driver"}, [card, other])):
        lost = figures(7.0, {"A": 6.0, "B": 5.0}, failed=failed)
        for one in (card, other):
            free = None if one in blind else 5 * GIB
            assert lost.of(one).free_bytes == free and lost.of(one).device == one.id
    newest = [
        figures(7.0, cards).newest for cards in ({}, {"A": 6.0, "B": 5.0}, {"A": 5.0, "B": 6.0})
    ]
    assert newest == [0.0, 6.0, 6.0]


@pytest.mark.parametrize(
    "cards, failed, troubles",
    [
        ({"A": -5.0, "B": 0.0}, {}, {}),
        ({"A": -5.5, "B": 0.0}, {}, {"A": "was last measured"}),
        ({"A": 0.0}, {}, {"B": "not among the cards"}),
        ({"A": 0.0, "B": 0.0}, {"B": "lost"}, {"B": "does not answer: lost"}),
        ({"A": -9.0, "B": 0.0}, {"B": "lost"}, {"A": "last measured", "B": "lost", "": "cuda:0"}),
        ({}, {"": "no driver"}, {"A": "no driver", "B": "no driver", "": "cuda:1"}),
    ],
)
def test_each_card_that_is_not_measured_is_named_and_all_of_them_together(
    place, clock, cards, failed, troubles
):
    """A sample that is five seconds old still counts."""
    reader = Sampling(place.path)
    taken = {uuid: clock.now + ago for uuid, ago in cards.items()}
    place.publish(figures(clock.now, taken, failed=failed))
    found = reader.trouble(5.0, NAMES)
    assert found.keys() == troubles.keys()
    assert all(words in found[uuid] for uuid, words in troubles.items())


def test_a_probe_has_the_helpers_figures_and_people(place, clock, started):
    card = Card(Device("cuda:3", 8 * GIB, uuid="A"), None, torch="cuda:0")
    probe = Probe((card.device, Device(HOST, GIB)), Listing(nvml, (card,)))
    people = {7: Person(1, "python train.py")}
    place.publish(figures(clock.now, {"A": clock.now}, people=people))
    probe.follow(place.path)
    assert {id: sample.device for id, sample in probe.samples(0.0).items()} == {
        "cuda:3": "cuda:3",
        HOST: HOST,
    }
    assert probe.people() == {7: (name_of(1), "python train.py")}


def test_before_the_first_figures_no_card_is_measured(place, clock):
    reader = Sampling(place.path)
    for seconds, words in ((0.0, "yet"), (1.0, "yet"), (1.0, "yet for 2.0 s")):
        clock.advance(seconds)
        assert reader.trouble(5.0, NAMES)[""].endswith(words)
    (place.path / "samples").write_bytes(b'{"pid": "x"}')  # of another version
    assert reader.figures() is None and "" in reader.trouble(5.0, NAMES)


def test_fresh_figures_are_those_measured_after_the_request(place, clock, started):
    """A helper that does not answer delays one decision, and none after it until it has answered."""
    reader, old = Sampling(place.path), figures(clock.now - 1)
    place.publish(old)
    assert reader.fresh() == old and clock.slept == 0.0, "no helper listens"
    bell = place.path / "sampler.bell"
    os.mkfifo(bell)
    ear = os.open(bell, os.O_RDWR | os.O_NONBLOCK)
    try:
        clock.asleep = lambda: place.publish(figures(clock.now))
        assert reader.fresh().began_at == clock.now > old.began_at
        assert os.read(ear, 9) == b"!"
        clock.asleep, before = (lambda: None), clock.slept
        clock.advance(1.0)
        late = reader.fresh()
        assert FRESH_SECONDS < clock.slept - before < 2 * FRESH_SECONDS
        before = clock.slept
        assert reader.fresh() == late and clock.slept == before
        clock.advance(1.0)
        place.publish(figures(clock.now))
        clock.asleep = lambda: place.publish(figures(clock.now))
        assert reader.fresh().began_at >= clock.now - FRESH_SECONDS
    finally:
        os.close(ear)


@pytest.mark.parametrize(
    "oldest, age, card, failed, waits",
    [
        (LATE_SECONDS, LATE_SECONDS, None, {}, False),
        (LATE_SECONDS, LATE_SECONDS + 0.1, None, {}, True),
        (0.0, 0.1, None, {}, True),
        (0.0, 0.0, 0.0, {}, False),
        (0.0, 0.0, 0.1, {}, True),
        (0.0, 0.0, 0.1, {"A": "lost"}, False),
        (0.0, 0.0, 0.1, {"": "no driver"}, False),
    ],
)
def test_figures_are_waited_for_if_there_are_only_older_ones(
    place, clock, started, oldest, age, card, failed, waits
):
    """A card that was late in the newest round has a sample of an earlier one."""
    cards = {} if card is None else {"A": clock.now - card}
    place.publish(figures(clock.now - age, cards, failed=failed))
    Sampling(place.path).wait(2.0, oldest, cards)
    assert (clock.slept > 2.0) is waits and len(started) == 1


def test_what_a_process_holds_is_read_from_its_cards_new_sample(place, clock, started):
    """A slow driver answers after the round that was asked for: its older sample shows a load's middle."""
    card = Card(Device("cuda:0", 8 * GIB, uuid="A"), None, torch="cuda:0")
    probe = Probe((card.device, Device(HOST, GIB)), Listing(nvml, (card,)))

    def publish(taken_at, size):
        sample = Sample("", taken_at, GIB, {41: size, 42: 1})
        place.publish(replace(figures(clock.now), cards={"A": sample}))

    publish(clock.now, GIB)
    probe.follow(place.path)
    clock.advance(1.0)
    asked = clock.now
    late = lambda: clock.now < asked + 1
    clock.asleep = lambda: publish(*((asked - 1, GIB) if late() else (asked, 2 * GIB)))
    assert probe.charged((41, 42), ("cuda:0", HOST)) == {"cuda:0": 2 * GIB + 1}
    assert clock.now >= asked + 1


def test_a_helper_is_started_once_in_a_while(place, clock, started):
    """Each reader looks twice a second at most, and a start has three seconds."""
    readers = [Sampling(place.path) for _ in range(2)]
    for _ in range(14):
        for reader in readers:
            reader.look_after()
        clock.advance(0.25)
    assert started == [0.0, 3.0]


# -- measuring
class Driver:
    """A source of two cards. The test sets what a card answers: a Sample, an error, or a wait."""

    def __init__(self) -> None:
        self.answers, self.waits = {}, threading.Event()

    def measure(self, card, now):
        answer = self.answers.get(card.device.uuid, "")
        if answer == "breaks":
            raise KeyError("pid")
        if answer == "hangs":
            assert self.waits.wait(PATIENCE)
        elif answer:
            raise NoAnswer(answer)
        return Sample(card.device.id, now, GIB, {os.getpid(): GIB, 2**22 + 1: GIB})


@pytest.fixture
def rounds(monkeypatch):
    """The rounds of a helper, and the driver of its cards."""
    driver = Driver()
    cards = [Card(Device(f"cuda:{n}", GIB, uuid=uuid), None) for n, uuid in enumerate("AB")]
    listing = Listing(driver, tuple(cards))
    monkeypatch.setattr(drivers, "listings", lambda: (listing,))
    monkeypatch.setattr(sampler, "ROUND_SECONDS", PATIENCE)
    yield sampler.CardRounds(), driver
    driver.waits.set()


def test_a_card_keeps_its_last_sample_until_its_next_answer(rounds, monkeypatch):
    """A card that fails or hangs hides no other card. All cards fail before the helper gives up."""
    cards, driver = rounds
    first = cards.next()
    assert set(first.cards) == {"A", "B"} and not first.failed and not cards.hopeless
    assert first.people[os.getpid()].uid == os.getuid() and set(first.people) == {os.getpid()}
    driver.answers = {"A": "lost"}
    second = cards.next()
    assert second.failed == {"A": "lost"} and not cards.hopeless
    assert second.cards["A"] == first.cards["A"]
    assert second.cards["B"].taken_at > first.cards["B"].taken_at
    driver.answers = {"A": "lost", "B": "lost too"}
    assert cards.next().failed == driver.answers and cards.hopeless
    driver.answers = {"B": "hangs"}
    monkeypatch.setattr(sampler, "ROUND_SECONDS", 0.0)
    until(lambda: cards.next().failed == {"B": "lost too"})
    assert not cards.hopeless
    driver.answers = {}
    driver.waits.set()
    until(lambda: not cards.next().failed)


def test_a_late_answer_is_not_taken_for_that_of_the_next_round(rounds, monkeypatch):
    cards, driver = rounds
    driver.answers = {"A": "hangs"}
    monkeypatch.setattr(sampler, "ROUND_SECONDS", 0.0)
    cards.next()
    driver.answers = {}
    driver.waits.set()
    until(lambda: not any(reader.busy for reader in cards._readers))
    monkeypatch.setattr(sampler, "ROUND_SECONDS", PATIENCE)
    found = cards.next()
    assert all(sample.taken_at >= found.began_at for sample in found.cards.values())


def test_a_card_whose_answer_cannot_be_read_has_failed_until_the_next_one(rounds):
    """Its thread goes on: a library may raise any error once."""
    cards, driver = rounds
    driver.answers = {"A": "breaks"}
    assert cards.next().failed == {"A": "KeyError: 'pid'"}
    driver.answers = {}
    assert not cards.next().failed


def test_a_machine_without_an_answer_is_hopeless(monkeypatch):
    for found, why in (((), "no driver lists a card"), ((Listing(None, failed={"0": "x"}),), "x")):
        monkeypatch.setattr(drivers, "listings", lambda found=found: found)
        cards = sampler.CardRounds()
        assert cards.hopeless and [*cards.next().failed.values()] == [why]


# -- how long the helper stays
class Steady:
    """Rounds whose free bytes change as long as the test says."""

    def __init__(self, clock) -> None:
        self.clock, self.hopeless, self.moves, self.began = clock, False, lambda: False, []

    def next(self) -> Figures:
        self.began.append(self.clock.now - 1000)
        free = len(self.began) if self.moves() else 0
        sample = Sample("", self.clock.now, free)
        return Figures(1, self.clock.now, sample, {"A": sample})


@pytest.fixture
def helper(tmp_path, clock, monkeypatch):
    """Runs `serve` with the rounds of the test, until it returns or 60 s have passed."""
    files, rounds = sampler.HelperFiles(tmp_path), Steady(clock)
    assert files.take_lock()
    lives = SimpleNamespace(until=float("inf"))

    class Poll:
        register = staticmethod(lambda *_: None)

        @staticmethod
        def poll(milliseconds):
            clock.advance(milliseconds / 1000)
            if clock.now >= 1060:
                (tmp_path / "sampler.lock").unlink()
            return []

    monkeypatch.setattr(sampler, "select", SimpleNamespace(poll=Poll, POLLIN=1))
    monkeypatch.setattr(sampler, "_any_owner_lives", lambda *_: clock.now < lives.until)

    def run() -> float:
        sampler.serve(files, rounds, SimpleNamespace(figures=None))
        return clock.now - 1000

    return rounds, lives, run


def test_cards_are_measured_each_second_while_their_use_changes(helper):
    rounds, _, run = helper
    rounds.moves = lambda: rounds.began[-1] < 20
    run()
    pauses = {
        at: round(later - at, 3) for at, later in zip(rounds.began, rounds.began[1:], strict=False)
    }
    assert {pause for at, pause in pauses.items() if at < 29} == {1.0}
    assert {pause for at, pause in pauses.items() if at > 31} == {2.0}


@pytest.mark.parametrize("last_owner, hopeless, ends", [(20.0, False, 25.0), (99.0, True, 11.0)])
def test_the_helper_ends_after_its_last_owner_or_its_last_answer(
    helper, last_owner, hopeless, ends
):
    """Five seconds after the one, ten after the other: a new helper can call a new driver."""
    rounds, lives, run = helper
    rounds.moves, rounds.hopeless = (lambda: True), hopeless
    lives.until = 1000 + last_owner
    assert ends - 1.01 < run() < ends + 0.01
