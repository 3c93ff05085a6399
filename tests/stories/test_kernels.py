"""A real kernel, seen from another process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from gpu_runtime import Runtime
from tests.clock import PATIENCE, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kernel(tmp_path):
    """A kernel that holds a model in a ledger on disk, and a function that reads that ledger in this process."""
    url, devices = f"keeper://{tmp_path}/ledger", "sim:24GiB,host:64GiB"
    paths = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", "")))
    )
    manager, client = start_new_kernel(
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "GPU_LEDGER": url,
            "GPU_DEVICES": devices,
            "JPY_SESSION_NAME": "/work/train.ipynb",
        }
    )
    with Runtime(devices=devices, ledger=url) as rt:
        try:
            client.execute_interactive(
                "%load_ext gpu\nrt.register('m', backend='fake', size='1GiB')", timeout=PATIENCE
            )
            yield client, rt
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)


def test_others_see_that_a_kernel_is_busy_and_since_when_it_is_not(kernel, tmp_path):
    client, rt = kernel

    def state():
        [section] = [section for section in rt.status().sections.values() if section.owner.notebook]
        return section.busy_since, section.idle_since

    until(lambda: state()[0] == 0 < state()[1])
    before, began = state(), rt.status().now
    end = tmp_path / "end"
    client.execute(f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.02)")
    until(lambda: state()[0] > 0)
    busy, idle = state()
    # The book has tenths of a second.
    assert began - 0.2 <= busy <= rt.status().now + 0.1 and idle == 0.0 and before[1] <= busy
    ending = rt.status().now
    end.touch()
    until(lambda: state()[0] == 0.0)
    assert ending - 1 <= state()[1] <= rt.status().now, "whole seconds"
