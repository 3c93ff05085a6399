"""Objects are listed in one step, so that a thread that builds a tuple is not disturbed."""

import contextlib
import gc
import sys
import threading

import pytest

from gpu_runtime import tracked_objects
from gpu_runtime.tracked_objects import instances


class Marked:
    """A class of this test only."""


def test_exactly_the_objects_of_these_classes_are_found():
    class Below(Marked):
        """A subclass is another class."""

    kept = [Marked(), Below()]
    assert instances({Marked}) == [kept[0]]
    assert instances({Marked, Below}) == kept or set(instances({Marked, Below})) == set(kept)
    assert instances(set()) == []


def test_what_python_itself_freezes_hides_nothing_of_the_user(monkeypatch):
    """No notebook of Python 3.12 was parked, since it freezes 375 objects of its own."""
    monkeypatch.setattr(tracked_objects, "PYTHONS_OWN", 1_000)
    for count, counted in ((0, 0), (375, 0), (5_000, 5_000)):
        monkeypatch.setattr(gc, "get_freeze_count", lambda count=count: count)
        assert tracked_objects.frozen() == counted


def test_a_listing_leaves_neither_references_nor_garbage():
    watched = tuple(range(1000, 1003))
    gc.collect()
    before = len(gc.get_referrers(watched))
    instances({Marked})
    assert len(gc.get_referrers(watched)) == before
    # Garbage in a cycle would keep all objects of the process until the next collection.
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        instances({Marked})
        assert gc.collect() == 0
    finally:
        if collects:
            gc.enable()


def test_a_thread_can_build_tuples_meanwhile():
    """`tuple(generator)` resizes a tuple. That fails if another object also refers to the tuple."""
    over, errors = threading.Event(), []

    def build():
        while not over.is_set():
            try:
                tuple(number for number in range(50))
            except SystemError as error:
                errors.append(error)

    builder = threading.Thread(target=build)
    builder.start()
    try:
        for _ in range(40):
            instances({Marked})
    finally:
        over.set()
        builder.join()
    assert not errors


@pytest.mark.parametrize("line", range(12))
def test_an_interrupt_at_any_line_leaves_the_collector_on(line):
    """In an earlier version an interrupt just after `gc.disable` left the collector off for ever."""
    left = [line]

    def step(frame, event, arg):
        if frame.f_code is instances.__code__ and event == "line":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            instances({Marked})
    finally:
        sys.settrace(before)
    try:
        assert gc.isenabled()
    finally:
        gc.enable()
