"""The lines of the user's own code under an error, and the one line of an interrupt."""

import json
import sys

import pytest

from gpu_runtime import errors, user_frames
from gpu_runtime.user_frames import MOST_LINES, rendered, shorten_interrupt, user_lines


def refuse(name="qwen"):
    raise errors.UnknownModel(name)


def caught(work, *arguments):
    with pytest.raises(BaseException) as found:
        work(*arguments)
    return found.value


def ends(error):
    """The user's lines without the path of this file."""
    return [line.split("test_user_frames.py, ")[-1] for line in user_lines(error)]


def test_the_line_that_failed_is_last_and_others_are_folded():
    assert ends(caught(refuse))[-1].endswith("in refuse: raise errors.UnknownModel(name)")

    def decode():
        json.loads("x", object_hook=refuse)

    lines = user_lines(caught(decode))
    assert "json/" not in "\n".join(lines)
    assert lines[-1].endswith('in decode: json.loads("x", object_hook=refuse)')

    def dive(depth):
        return dive(depth - 1) if depth else refuse()

    lines = ends(caught(dive, 50))
    assert len(lines) == MOST_LINES + 1 and "more (%tb)" in lines[MOST_LINES // 2]
    assert "in refuse" in lines[-1]


def test_an_error_raised_from_another_has_the_lines_of_that_one():
    """A memory report is raised at the end of a `with` block, from the error of a line inside. The
    shown line is the one inside.
    """

    class Block:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            raise errors.Busy("report") from error

    def cell():
        with Block():
            sum([])
            json.loads("x")

    lines = ends(caught(cell))
    assert any("in cell: json.loads" in line for line in lines)
    assert not any("in cell: with Block()" in line for line in lines)


def test_a_magic_is_shown_as_it_was_typed():
    shown = user_frames._as_typed
    assert shown("df = get_ipython().run_line_magic('gpu', 'plan qwen')") == "df = %gpu plan qwen"
    assert shown("""get_ipython().run_cell_magic('gpu', '2GiB', 'a = 1\\n')""") == "%%gpu 2GiB"
    assert shown("""get_ipython().run_line_magic('gpu', "why it's")""") == "%gpu why it's"


def test_without_a_notebook_an_error_is_its_report(monkeypatch):
    monkeypatch.setattr(user_frames, "_shell", lambda: None)
    error = errors.Busy("no room")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert rendered(error, ["no room"]) == ["no room"]
    assert error._render_traceback_() == ["Busy: no room", "", "More:  %gpu help Busy"]


def test_the_first_sentence_about_an_interrupt_stays():
    error = KeyboardInterrupt()
    shorten_interrupt(error, "Interrupted after 6 s; nothing is held.")
    shorten_interrupt(error, "Interrupted after 7 s; the request was withdrawn.")
    try:
        raise error
    except KeyboardInterrupt:
        assert error._render_traceback_() == ["Interrupted after 6 s; nothing is held."]
