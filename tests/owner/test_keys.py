"""The keys of decisions in progress, when an interrupt arrives while a key is made."""

from __future__ import annotations

import sys

import pytest

from gpu_runtime.owner.keys import Keys


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
    key = keys.new("use m")
    assert keys.texts() == ("me:1:use m",)
    keys.done_with(key.note)
    assert keys.texts() == ()
