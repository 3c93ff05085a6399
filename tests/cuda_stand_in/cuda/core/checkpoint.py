"""`Process`, as cuda-core 1.2.2 has it: a state, and four calls that change it or fail."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

FILE = Path(os.environ["CUDA_STAND_IN"])


class CUDAError(Exception):
    """The driver's error, as cuda-core raises it."""


class Process:
    """A CUDA process that can be locked, checkpointed, restored and unlocked."""

    def __init__(self, pid: int) -> None:
        if not isinstance(pid, int) or pid <= 0:
            raise ValueError("pid must be a positive int")
        self._pid = pid

    @property
    def state(self) -> str:
        return self._entry(json.loads(FILE.read_text()))["state"]

    def lock(self, timeout_ms: int = 0) -> None:
        if type(timeout_ms) is not int or timeout_ms < 0:
            raise TypeError("timeout_ms must be an int")
        self._change("lock", "running", "locked")

    def checkpoint(self) -> None:
        self._change("checkpoint", "locked", "checkpointed")

    def restore(self, gpu_mapping: Any = None) -> None:
        self._change("restore", "checkpointed", "locked")

    def unlock(self) -> None:
        self._change("unlock", "locked", "running")

    def _entry(self, book: dict[str, Any]) -> dict[str, Any]:
        try:
            os.kill(self._pid, 0)
            return book["processes"][str(self._pid)]
        except (KeyError, ProcessLookupError):
            raise CUDAError("CUDA_ERROR_INVALID_VALUE: no CUDA process has this pid") from None

    def _change(self, action: str, before: str, after: str) -> None:
        book = json.loads(FILE.read_text())
        entry = self._entry(book)
        book["calls"].append(f"{action} {self._pid}")
        fault = book["faults"].get(action)
        if fault == "dies":
            os.kill(self._pid, signal.SIGKILL)
            book["processes"].pop(str(self._pid))
        elif fault == "fails":
            entry["state"] = "failed"
        elif not fault and entry["state"] == before:
            entry["state"] = after
        FILE.write_text(json.dumps(book))
        if fault == "hangs":
            time.sleep(60)
        if fault == "dies":
            while Path(f"/proc/{self._pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.001)
        if fault:
            raise CUDAError(book["texts"].get(fault, "CUDA_ERROR_UNKNOWN"))
        if entry["state"] != after:
            raise CUDAError(f"CUDA_ERROR_ILLEGAL_STATE: {action} of a {entry['state']} process")
