"""Measures `with rt.use` of a model that is on its device, with 50 leases in a kept book and a running monitor."""

import statistics
import tempfile
import time

from gpu_runtime import Runtime


def microseconds(leases: int = 50, rounds: int = 20_000) -> tuple[float, float]:
    """The median and the 99th percentile in µs of `with rt.use(resident): pass`."""
    with tempfile.TemporaryDirectory() as directory:
        rt = Runtime(devices="sim:2x100GiB,host:400GiB", ledger=f"keeper://{directory}/ledger")
        for number in range(leases):
            rt.register(f"m{number}", backend="fake", size="1GiB")
            rt.preload(f"m{number}")
        entered = sorted(_timed(rt, "m7") for _ in range(rounds))
        rt.close()
    return statistics.median(entered) * 1e6, entered[int(rounds * 0.99)] * 1e6


def _timed(rt: Runtime, name: str) -> float:
    began = time.perf_counter()
    with rt.use(name):
        pass
    return time.perf_counter() - began
