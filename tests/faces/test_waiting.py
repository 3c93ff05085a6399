"""A cell shows a line while its model waits. The line is removed when the model is loaded."""

from __future__ import annotations

import threading

from gpu.waiting import WaitLine, sentence

from gpu_runtime.facts import Candidate, Share, Wait
from gpu_runtime.units import GIB

WAIT = Wait(
    "llama (14.0 GiB on cuda:0) is in use by train.ipynb (pid 4121) for 3 min",
    ahead=2,
    considered=(Candidate((Share("cuda:0", 12 * GIB),), False, ""),),
)


def test_the_line_has_the_need_the_holder_and_the_requests_ahead():
    assert sentence("qwen", WAIT) == (
        "qwen waits for 12.0 GiB on cuda:0: llama (14.0 GiB on cuda:0) is in use by train.ipynb (pid 4121) for 3 min; "
        "2 ahead of you"
    )


def test_a_short_wait_shows_nothing_and_the_line_of_a_long_one_is_removed(monkeypatch):
    now, shown = [0.0], []
    line = WaitLine(notebook=False, clock=lambda: now[0])
    monkeypatch.setattr(line, "_show", shown.append)
    line("qwen", WAIT)
    now[0] = 0.5
    line("qwen", WAIT)
    line("qwen", None)
    assert shown == [""]
    now[0] = 10.0
    line("qwen", WAIT)
    now[0] = 11.5
    line("qwen", WAIT)
    line("qwen", None)
    assert shown == ["", sentence("qwen", WAIT), ""]


def test_waits_of_other_threads_show_nothing(monkeypatch):
    shown = []
    line = WaitLine(notebook=False)
    monkeypatch.setattr(line, "_show", shown.append)
    thread = threading.Thread(target=line, args=("qwen", WAIT))
    thread.start()
    thread.join()
    line("qwen", None)
    assert shown == [""]
