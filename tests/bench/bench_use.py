"""Measures `with rt.use` of a model that is on its device, with 50 leases in a SQLite book and a running monitor."""

from __future__ import annotations

import statistics
import tempfile
import time

from gpu_runtime import Runtime


def microseconds(leases: int = 50, rounds: int = 20_000) -> dict[str, float]:
    """The median and the 99th percentile in µs of `with rt.use(resident): pass`.

    The result also has the median of the first use after an eviction.
    """
    with tempfile.TemporaryDirectory() as directory:
        rt = Runtime(devices="sim:2x100GiB,host:400GiB", ledger=f"sqlite://{directory}/ledger")
        for number in range(leases):
            rt.register(f"m{number}", backend="fake", size="1GiB")
            rt.preload(f"m{number}")
        entered = [_timed(rt, "m7") for _ in range(rounds)]
        restored = []
        for _ in range(30):
            rt.evict("m7")
            restored.append(_timed(rt, "m7"))
        rt.close()
    entered.sort()
    return {
        "resident, median": statistics.median(entered) * 1e6,
        "resident, p99": entered[int(rounds * 0.99)] * 1e6,
        "from host, median": statistics.median(restored) * 1e6,
    }


def _timed(rt: Runtime, name: str) -> float:
    began = time.perf_counter()
    with rt.use(name):
        pass
    return time.perf_counter() - began


if __name__ == "__main__":
    for name, value in microseconds().items():
        print(f"{name:>18}  {value:9.1f} µs")
