"""The driver's checkpoint calls on another process: its state, lock, checkpoint, restore, unlock.

The calls use `cuda.core.checkpoint`; they need the package cuda-core 1.0 and the driver 570, or
later versions. A call can hang, and a call loads CUDA. So each call runs with a time limit in a
helper process, which runs this module as a program. Nothing here decides whether the memory of a
process may be moved to host memory.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib import metadata

from ..files import child_environment

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"
START_SECONDS = 20.0  # the helper's start: Python, cuda-core and the driver's library
MOST_TEXT = 300  # characters of the driver's own message


class CallFailed(Exception):
    """The driver refused a call; the text is the driver's own message."""


class NotAvailable(CallFailed):
    """This machine has no checkpoint calls; the text says what is missing."""


class CheckpointTimeout(CallFailed):
    """The call did not return within its time limit. The state of the process is not known."""


def call(action: str, pid: int, *, seconds: float, lock_seconds: float = 0.0) -> str:
    """Performs the `action`. Returns the new state of the CUDA process `pid`.

    Actions are `state`, `lock`, `checkpoint`, `restore` and `unlock`. `seconds` is the time limit
    of the driver's call; the helper's start gets START_SECONDS more. The action `lock` gives up
    after `lock_seconds`. Raises CallFailed, NotAvailable, CheckpointTimeout.
    """
    words = [sys.executable, "-m", __name__, action, str(pid), str(int(lock_seconds * 1000))]
    try:
        ended = subprocess.run(
            words,
            cwd="/",  # a module in the notebook's directory could hide a standard module
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS + seconds,
            start_new_session=True,  # the stop button must not end the helper during a call
        )
    except subprocess.TimeoutExpired:
        raise CheckpointTimeout(
            f"the driver did not answer for {START_SECONDS + seconds:.0f} s"
        ) from None
    except OSError as error:
        raise NotAvailable(f"the helper process cannot be started: {error.strerror}") from None
    return _state_in(ended)


def _state_in(ended: subprocess.CompletedProcess[str]) -> str:
    """The state that the helper process printed. If the helper printed an error, raises it."""
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise CallFailed(f"the helper process failed: {last[:MOST_TEXT]}") from None
    if "missing" in answer:
        raise NotAvailable(answer["missing"])
    if "failed" in answer:
        raise CallFailed(answer["failed"])
    return answer["state"]


# -- in the helper process -----------------------------------------------------------------------


def perform(action: str, pid: int, lock_ms: int) -> dict[str, str]:
    """Makes one checkpoint call. The result has one key: `state`, `failed`, or `missing`."""
    try:
        checkpoint = importlib.import_module("cuda.core").checkpoint
    except (ImportError, AttributeError) as error:
        return {"missing": _why_missing(error)}
    try:
        process = checkpoint.Process(pid)
        if action == "lock":
            process.lock(timeout_ms=lock_ms)
        elif action != "state":
            getattr(process, action)()
        return {"state": str(process.state)}
    except Exception as error:  # the library raises errors of several classes
        return {"failed": " ".join(str(error).split())[:MOST_TEXT] or type(error).__name__}


def _why_missing(error: Exception) -> str:
    try:
        version = metadata.version("cuda-core")
    except metadata.PackageNotFoundError:
        return "the package cuda-core is not installed"
    if version.startswith("0."):
        return f"cuda-core {version} is too old: 1.0 or later is needed"
    return f"cuda-core {version} cannot be imported ({error})"


if __name__ == "__main__":
    print(json.dumps(perform(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
