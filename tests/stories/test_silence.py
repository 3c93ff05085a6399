"""A process that is stopped while another process sends it a request."""

from __future__ import annotations

import signal

import pytest

from gpu_runtime import Runtime
from tests.clock import until
from tests.stories.test_processes import DEVICES, Kernel


def test_a_stopped_kernel_is_named_with_since_when_until_it_goes_on(tmp_path):
    """The stopped process lives and keeps its memory. It carries out the request when it runs again."""
    kernel = Kernel(f"keeper://{tmp_path}/ledger")
    try:
        kernel.tell("rt.register('qwen', backend='fake', size='10GiB'); rt.preload('qwen')")
        with Runtime(devices=DEVICES, ledger=f"keeper://{tmp_path}/ledger") as console:
            kernel.signal(signal.SIGSTOP)
            asked_at = console.status().now
            with console.on_behalf_of("ann"):
                assert not console.evict("qwen", wait=False).done
            assert console.status().unanswered == (), "too soon to say"
            until(lambda: console.status().unanswered)
            [one] = console.status().unanswered
            assert (one.owner.pid, one.ticket.verb, one.ticket.said_by) == (
                kernel.process.pid,
                "evict",
                "ann",
            )
            assert one.since == pytest.approx(asked_at, abs=1.0)
            kernel.signal(signal.SIGCONT)
            until(lambda: not console.status().unanswered)
            until(lambda: console.leases()["device"].tolist() == ["host"])
    finally:
        kernel.signal(signal.SIGCONT)
        kernel.end()
