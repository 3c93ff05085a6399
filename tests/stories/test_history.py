"""The host's helper writes the history without a console: the keeper, Redis, after a kill, after a new start."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpu_runtime import Runtime
from gpu_runtime.facts import Moment
from gpu_runtime.telemetry.recorder import record_in
from gpu_runtime.units import GIB
from tests.clock import until

from .kernels import DEVICES, Kernel, has_ended, kind


class Box:
    """A ledger with one kernel on simulated cards. The helper starts at once, not after five seconds."""

    def __init__(self, ledger: str, notes: Path) -> None:
        self.ledger, self.kernel = ledger, Kernel(ledger)
        self.kernel.do(
            "import pathlib, sys; sys.modules['gpu_runtime.runtime'].RECORD_AFTER_SECONDS = 0",
            f"pathlib.Path({str(notes)!r}).write_text(str(rt._session.ledger.directory))",
        )
        self.directory = Path(notes.read_text())
        self.kernel.do("rt.register('qwen', backend='fake', size='10GiB'); rt.preload('qwen')")
        until(lambda: self.used()[-1:] == [10])

    def moments(self) -> tuple[Moment, ...]:
        """The recorded moments of the card. They are read without a runtime in this process."""
        moments = record_in(self.directory).between(0, 1e11, 10**15)
        return tuple(one for one in moments if one.device == "sim:0")

    def used(self) -> list[int]:
        """The GiB in use on the card, each different value once."""
        steps: list[int] = []
        for one in self.moments():
            if not steps or steps[-1] != one.measured_bytes // GIB:
                steps.append(one.measured_bytes // GIB)
        return steps

    def helpers(self) -> list[int]:
        return [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if "gpu_runtime.telemetry.sampler" in (words := process.info["cmdline"] or [])
            and words[-1] == str(self.directory)
        ]

    def is_offloaded(self) -> bool:
        return self.used()[-2:] == [10, 0]


@pytest.fixture
def box(ledger: str, tmp_path: Path) -> Iterator[Box]:
    """A box whose card is used by 10 GiB, as its helper has recorded."""
    own = "" if kind(ledger) == "keeper" else f"&owners={tmp_path}/owners"
    one = Box(ledger + own, tmp_path / "notes")
    yield one
    one.kernel.end()
    for pid in one.helpers():
        os.kill(pid, signal.SIGKILL)


def test_what_happens_is_recorded_while_nobody_looks(box):
    """One process records the use without any request. A later reader sees the figures and the reasons."""
    box.kernel.do("rt.evict('qwen')")
    until(box.is_offloaded)
    assert len(box.helpers()) == 1
    [claims] = {tuple(one.claims.items()) for one in box.moments() if one.measured_bytes}
    assert claims == ((f"qwen@{box.kernel.process.pid}", 10 * GIB),)
    with Runtime(devices=DEVICES, ledger=box.ledger, monitor=False) as console:
        story = console.history("1h", points=10**6)
        assert {10 * GIB, 0} <= {one.measured_bytes for one in story.of("sim:0")}
        assert [event.action for event in story.events] == ["granted", "loaded", "offloaded"]


def test_a_killed_recorder_is_replaced_and_what_it_wrote_stays(box):
    [helper] = box.helpers()
    os.kill(helper, signal.SIGKILL)
    box.kernel.do("rt.evict('qwen')")
    until(box.is_offloaded)
    until(lambda: len(box.helpers()) == 1 and helper not in box.helpers())


def test_a_recorder_ends_with_its_ledgers_last_owner(box):
    [helper] = box.helpers()
    box.kernel.end()
    until(lambda: has_ended(helper))
