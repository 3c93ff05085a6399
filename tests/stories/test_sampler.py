"""The host's helper process with the real NVML binding and a fake driver. Cards are lost, hang, or report nothing."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from gpu_runtime.attribution import name_of
from gpu_runtime.devices.sampler_client import Sampling, boot_seconds
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.units import GIB
from tests.clock import PATIENCE, finished, until
from tests.nvml_driver import Host

from .kernels import has_ended


def registered(host: Host, gib: int = 1):
    """A kernel with a model of that size, and a monitor, which watches the helper."""
    kernel = host.kernel()
    kernel.evaluate(f"rt.register('m', backend='fake', size='{gib}GiB') and None")
    return kernel


def test_two_kernels_share_one_helper_and_its_figures(host, driver):
    driver.set(_0_free=70 * GIB)
    one, other = host.kernel(), host.kernel()
    helper = host.helper()
    view = (
        "[(v.device.id, v.measured_bytes, v.sample.utilisation_percent, v.sample.temperature_celsius) "
        "for v in rt.status().devices][0]"
    )
    until(lambda: one.evaluate(view) == other.evaluate(view) == ["cuda:0", 10 * GIB, 37, 61])
    driver.set(_0_free=60 * GIB)
    until(lambda: one.evaluate(view)[1] == other.evaluate(view)[1] == 20 * GIB)
    assert host.helpers() == [helper]
    assert os.getsid(helper) == helper, "the stop button signals a kernel's whole group"


def test_a_model_counts_with_what_the_driver_reports_after_its_load(host, driver):
    """Figures of before would count a load in its middle, or an engine that was not there yet."""
    kernel = host.kernel()
    for size in (GIB, 2 * GIB, 3 * GIB):
        driver.set(_0_processes=f"41:{size}")
        now = kernel.evaluate("rt.probe.charged((41,), ('cuda:0',))")
        assert now == {"cuda:0": size}


def test_eight_kernels_that_start_at_once_elect_one(host, driver):
    driver.set(count=8)
    code = (
        f"import time; from gpu_runtime import Runtime; rt = Runtime(devices='cuda', ledger={host.url!r})\n"
        "while None in (found := [v.measured_bytes for v in rt.status().devices][:-1]): time.sleep(0.05)\n"
        "print(found); input()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | driver.environment
    words = [sys.executable, "-c", code]
    programs = [subprocess.Popen(words, env=environment, **options) for _ in range(8)]
    try:
        assert [program.stdout.readline() for program in programs] == [f"{[0] * 8}\n"] * 8
        until(lambda: host.helpers() == [host.figures().pid])  # later ones see the lock and end
    finally:
        for program in programs:
            program.kill()
            program.wait(PATIENCE)


def test_a_killed_helper_is_replaced(host):
    kernel = registered(host)
    for _ in range(3):
        before = host.figures().pid
        os.kill(before, signal.SIGKILL)
        until(lambda: host.figures().pid != before)  # noqa: B023
    until(lambda: len(host.helpers()) == 1 and kernel.degraded == "")


def test_a_helper_ends_when_all_its_kernels_have(host):
    kernel, other = host.kernel(), host.kernel()
    helper = host.helper()
    kernel.end()
    other.end()
    until(lambda: has_ended(helper))


def test_a_helper_ends_when_its_directory_is_gone(host):
    host.kernel()
    helper = host.helper()
    shutil.rmtree(host.directory)
    until(lambda: helper not in host.helpers())


@pytest.mark.parametrize("name", ["samples", "sampler.lock", "sampler.err"])
def test_a_pipe_in_the_place_of_a_file_keeps_no_reader_waiting(tmp_path, name):
    """Another member of a shared ledger could put it there."""
    os.mkfifo(tmp_path / name)
    sampling = Sampling(tmp_path)
    assert (sampling.figures(), sampling._holder(), sampling._last_error()) == (None, None, "")


def test_a_hanging_driver_freezes_no_kernel_and_grants_nothing(host, driver):
    """The helper hangs and is killed, and so is the next one. Kernels only notice that the figures are old."""
    kernel = registered(host)
    helper = host.helper()
    driver.set(all_hang=1)
    until(lambda: helper not in host.helpers())
    # A status that called the driver would end only when it hangs no more.
    until(lambda: "the driver may hang" in kernel.degraded)
    told = kernel.evaluate("rt.preload('m', timeout=0.5)")
    assert told.startswith("Busy") and "the last measurement of cuda:0 is" in told
    until(lambda: len(host.helpers()) == 1)
    driver.set(all_hang=None)
    until(lambda: kernel.degraded == "")
    assert kernel.evaluate(f"rt.preload('m', timeout={PATIENCE}).done") is True


def test_a_stopped_helper_is_replaced(host):
    """Until then a status shows its last figures, and does not wait for others."""
    kernel = registered(host)

    def is_shown() -> bool:
        stopped = host.figures().pid
        os.kill(stopped, signal.SIGSTOP)
        until(lambda: boot_seconds() - host.figures().began_at > 3 or host.figures().pid != stopped)
        last = host.figures()
        kernel.evaluate("rt.status() and None")
        shown = host.figures() == last and last.pid == stopped
        until(lambda: host.figures().pid != stopped and stopped not in host.helpers())
        return shown

    until(is_shown)


def test_one_card_that_hangs_blinds_nobody_to_the_others(host, driver):
    driver.set(count=8)
    kernel = host.kernel()
    helper = host.helper()
    driver.set(_3_hang=1, all_free=50 * GIB)
    until(lambda: "cuda:3 (Fake 80GB) was last measured" in kernel.degraded)
    used = "[v.measured_bytes for v in rt.status().devices][:-1]"
    until(lambda: kernel.evaluate(used) == [30 * GIB] * 3 + [0] + [30 * GIB] * 4)
    assert host.helpers() == [helper], "it serves the others, and a new one could do no more"
    assert kernel.evaluate("rt.health().healthy") is False
    driver.set(_3_hang=None)
    until(lambda: kernel.evaluate(used)[3] == 30 * GIB and kernel.degraded == "")


def test_a_lost_card_is_named_and_not_granted_on(host, driver):
    driver.set(count=2)
    kernel = host.kernel()
    driver.set(_0_error=15)
    until(lambda: "cuda:0 (Fake 80GB) does not answer: GPU is lost" in kernel.degraded)
    kernel.evaluate("rt.register('m', backend='fake', size='1GiB', devices=('cuda:0',)) and None")
    kernel.evaluate("rt.register('n', backend='fake', size='1GiB', devices=('cuda:1',)) and None")
    assert kernel.evaluate(f"rt.preload('n', timeout={PATIENCE}).where") == "cuda:1"
    told = kernel.evaluate("rt.preload('m', timeout=0.2)")
    assert told.startswith("Busy")
    assert "the driver of cuda:0 does not say how much memory is free" in told
    driver.set(_0_error=None)
    until(lambda: kernel.degraded == "")
    assert kernel.evaluate(f"rt.preload('m', timeout={PATIENCE}).where") == "cuda:0"


def test_memory_that_the_driver_will_not_tell_is_waited_for_with_the_reason(host, driver):
    kernel = registered(host)
    driver.set(_0_free="na")
    until(lambda: kernel.evaluate("[v.stranger_bytes for v in rt.status().devices][0]") is None)
    told = kernel.evaluate("rt.preload('m', timeout=0.2)")
    assert "the driver of cuda:0 does not say how much memory is free" in told
    driver.set(_0_free=None)
    assert kernel.evaluate(f"rt.preload('m', timeout={PATIENCE}).done") is True


@pytest.mark.parametrize(
    "error, says", [(18, "ProbeFailed: .*version mismatch"), (9, "simulated"), (None, "simulated")]
)
def test_a_driver_that_is_broken_is_told_and_one_that_is_missing_simulated(
    driver, tmp_path, error, says
):
    """With `auto`, a driver that fails is an error. If the driver or its library is missing, cards are simulated."""
    driver.set(init=error)
    environment = {**os.environ, **driver.environment}
    if error is None:
        (tmp_path / "driver" / "libnvidia-ml.so.1").unlink()
    code = (
        "from gpu_runtime import Runtime; rt = Runtime(ledger='memory:');"
        "print(rt.status().devices[0].device.name)"
    )
    ran = finished([sys.executable, "-c", code], env=environment)
    assert re.search(says, ran.stdout + ran.stderr)


def test_memory_of_strangers_is_measured_and_named(host, driver):
    """A process without leases is shown as the driver reports it. If its pid is unknown, no user is shown."""
    driver.set(
        _0_free=50 * GIB, _0_processes=f"{os.getpid()}:{20 * GIB},4194000:{5 * GIB},4194001:na"
    )
    kernel = registered(host, 50)
    shown = kernel.evaluate("[[s.device, s.pid, s.bytes, s.user] for s in rt.status().strangers]")
    assert shown == [
        ["cuda:0", os.getpid(), 20 * GIB, name_of(os.geteuid())],
        ["cuda:0", 4194000, 5 * GIB, ""],
        ["cuda:0", 4194001, None, ""],
    ]
    assert kernel.evaluate("rt.status().strangers[0].command")
    assert kernel.evaluate("[v.stranger_bytes for v in rt.status().devices][0]") == 30 * GIB
    # 50 GiB are really there
    assert kernel.evaluate(f"rt.preload('m', timeout={PATIENCE}).done") is True
    driver.set(_0_free=0, _0_processes=f"{kernel.process.pid}:{51 * GIB},{os.getpid()}:{20 * GIB}")
    until(lambda: kernel.evaluate("[v.residue_bytes for v in rt.status().devices][0]") == GIB)
    assert kernel.evaluate("[v.stranger_bytes for v in rt.status().devices][0]") == 29 * GIB
    assert kernel.evaluate("[s.pid for s in rt.status().strangers]") == [os.getpid()]


def test_what_a_killed_kernel_held_is_granted_when_the_driver_shows_it_free(host, driver):
    kernel, other = registered(host, 60), host.kernel()
    assert kernel.evaluate(f"rt.preload('m', timeout={PATIENCE}).done") is True
    held = {"_0_free": 20 * GIB, "_0_processes": f"{kernel.process.pid}:{60 * GIB}"}
    driver.set(**held)
    other.evaluate("rt.register('n', backend='fake', size='30GiB') and None")
    kernel.end()
    other.send(f"rt.preload('n', timeout={PATIENCE}).done")
    with contextlib.closing(open_ledger(host.url)) as ledger:
        until(lambda: any(ghost.pid == kernel.process.pid for ghost in ledger.read().ghosts))
        told = "has not yet freed the memory of pid"
        until(lambda: any(told in ticket.because for ticket in ledger.read().tickets))
        driver.set(_0_free=None, _0_processes=None)
        assert other.read_answer() is True and ledger.read().ghosts == ()
