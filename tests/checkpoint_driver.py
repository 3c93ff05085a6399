"""A simulated driver with the checkpoint calls, for machines without a card.

A checkpoint moves the CUDA memory of a process to host memory. `CheckpointDriver` has two tasks. It
reports how full the cards are. And it writes the file from which `tests/cuda_stand_in`, the stand-in
for cuda-core, knows the processes. The stand-in runs in a helper process, as the real package does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_runtime.devices.drivers import Card, Listing
from gpu_runtime.devices.probe import Probe, host_device
from gpu_runtime.facts import Device, Sample
from gpu_runtime.units import GIB

STAND_IN = Path(__file__).with_name("cuda_stand_in")
TEXTS = {
    "times out": "CUDA_ERROR_NOT_READY: device not ready",
    "no memory": "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    "refuses": "CUDA_ERROR_NOT_SUPPORTED: operation not supported",
    "fails": "CUDA_ERROR_UNKNOWN: unknown error",
}


class CheckpointDriver:
    """Cards of 24 GiB, and processes that hold memory on them until they are checkpointed."""

    KIND, NAME = "cuda", "NVML"

    def __init__(self, file: Path, cards: int = 1, parts: bool = False) -> None:
        self.file, self.version = file, "580.82.07"
        self._targets: list[subprocess.Popen[bytes]] = []
        devices = [Device(f"cuda:{n}", 24 * GIB, "Card", f"GPU-{n}", n) for n in range(cards)]
        whole = f"GPU-{'x' * parts}"
        self.cards = tuple(Card(one, None, f"{whole}{n}") for n, one in enumerate(devices))
        self._write({"processes": {}, "faults": {}, "calls": [], "texts": TEXTS})

    # -- the source of figures

    def measure(self, card: Card, now: float) -> Sample:
        """What the driver reports: a checkpointed process holds nothing."""
        held = {}
        for pid, one in self.read()["processes"].items():
            if one["state"] != "checkpointed" and card.device.uuid in one["cards"]:
                held[int(pid)] = one["cards"][card.device.uuid]
        free = card.device.total_bytes - sum(size or 0 for size in held.values())
        return Sample(card.device.id, now, free, held)

    def versions(self) -> dict[str, str]:
        return {"driver": self.version}

    def probe(self) -> Probe:
        devices = (*(card.device for card in self.cards), host_device())
        return Probe(devices, Listing(self, self.cards))  # type: ignore[arg-type]

    # -- what tests set and read

    def process(self, state: str = "running", **cards: int | None) -> subprocess.Popen[bytes]:
        """Starts a living process that holds the given GiB on cards, named by number: `process(_0=12)`."""
        target = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self._targets.append(target)
        book = self.read()
        book["processes"][str(target.pid)] = {"state": state, "cards": _by_uuid(cards)}
        self._write(book)
        return target

    def grow(self, target: Any, **cards: int | None) -> None:
        """Lets `target` hold other GiB on its cards."""
        book = self.read()
        book["processes"][str(target.pid)]["cards"] = _by_uuid(cards)
        self._write(book)

    def forget(self, target: Any) -> None:
        """Makes `target` a process that does not use CUDA."""
        book = self.read()
        del book["processes"][str(target.pid)]
        self._write(book)

    def fault(self, **faults: str) -> None:
        """Makes the named calls fail from now on: `fault(lock="times out", restore="no memory")`."""
        book = self.read()
        book["faults"] = faults
        self._write(book)

    def state(self, target: Any) -> str:
        return self.read()["processes"][str(target.pid)]["state"]

    def calls(self) -> list[str]:
        """The names of the calls that changed something or tried to, in the order of the calls."""
        return [call.split()[0] for call in self.read()["calls"]]

    def read(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())

    def _write(self, book: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(book))

    def end(self) -> None:
        for target in self._targets:
            target.kill()
            target.communicate()


def _by_uuid(cards: dict[str, int | None]) -> dict[str, int | None]:
    return {f"GPU-{name[1:]}": size and size * GIB for name, size in cards.items()}
