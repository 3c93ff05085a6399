"""The keys of decisions in progress."""

import sys
import threading
from threading import get_ident

import pytest

from gpu_runtime.owner.session import Keys


@pytest.mark.parametrize("line", range(1, 4))
def test_an_interrupt_while_a_key_is_noted_leaves_no_key(line):
    """A notebook keeps its last error, and with it the frame that was interrupted. Even then no key stays."""
    keys, lines = Keys("me"), []

    def trace(frame, event, arg):
        if frame.f_code.co_name != "_note":
            return trace if event == "call" else None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == line:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt) as kept:
            keys.new("use m")
    finally:
        sys.settrace(None)
    assert kept.value.__traceback__ and keys.texts() == ()


def test_a_key_is_known_until_it_is_released():
    keys = Keys("me")
    made = [keys.new(what) for what in ("use m", "use m", "evict m")]
    assert set(keys.texts()) == {"me:1:use m", "me:2:use m", "me:3:evict m"}
    released = made.pop(1)
    keys.done_with(released.note)
    assert set(keys.texts()) == {"me:1:use m", "me:3:evict m"}
    made.clear()
    assert keys.texts() == ()


def test_an_ended_wait_is_that_of_its_key_or_of_its_thread_and_keeps_the_first_reason():
    keys, others = Keys("me"), []
    mine, too = keys.new("use a"), keys.new("use b")
    thread = threading.Thread(target=lambda: others.append(keys.new("use c")))
    thread.start()
    thread.join()
    [other] = others
    assert keys.end(mine.text, "ann") and not keys.end("me:9:use a", "ann")
    assert [key.ended_by for key in (mine, too, other)] == ["ann", "", ""]
    keys.end_of(get_ident(), "its caller")
    assert [key.ended_by for key in (mine, too, other)] == ["ann", "its caller", ""]
    keys.done_with(too.note)
    assert not keys.end(too.text, "ann")


def test_work_keeps_its_key_known_and_is_skipped_once_the_key_is_gone():
    """An interrupt of the caller ends its key. Work that has begun keeps its reserved bytes until its end."""
    keys, seen = Keys("me"), []
    key = keys.new("load m")
    work = keys.kept(key, lambda: (keys.done_with(key.note), seen.append(keys.texts())))
    work()
    assert seen == [("me:1:load m",)] and keys.texts() == ()
    work()
    assert len(seen) == 1 and keys.texts() == ()
    with pytest.raises(ZeroDivisionError):
        keys.uninterrupted(kept := keys.new("move m"), lambda: 1 / 0)
    assert keys.texts() == (kept.text,)
