"""Processes with a runtime, which a test tells what to do, and processes that print what they have counted."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from gpu_runtime import Busy, Runtime
from tests import forked
from tests.clock import until

SLEEPS = {"35", "230", "101", "115"}  # nanosleep and clock_nanosleep of x86-64 and of ARM
ROOT = Path(__file__).parents[2]
DEVICES = "sim:24GiB,host:64GiB"
LOADED = "rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')"
USED = "held = rt.use('qwen'); held.__enter__()"
LET_GO = "type(held).__exit__(held, None, None, None)"
ONLY_KEEPER = pytest.mark.parametrize("ledger", ["keeper"], indirect=True)


class Kernel(forked.Answering):
    """Another process with a runtime. It runs commands line by line, and ends with the `with` block."""

    def __init__(self, ledger: str, devices: str = DEVICES) -> None:
        program = textwrap.dedent(f"""
            import sys
            from gpu_runtime import Runtime
            rt = Runtime(devices={devices!r}, ledger={ledger!r}, eviction_grace_seconds=0)
            print("ready", flush=True)
            for line in sys.stdin:
                try:
                    exec(line, globals())
                    print("done", flush=True)
                except BaseException as error:
                    print(f"{{type(error).__name__}}: {{error}}".splitlines()[0], flush=True)
        """)
        super().__init__(program)
        assert self.answer() == "ready"

    def do(self, *lines: str) -> None:
        """Runs commands that must succeed."""
        for line in lines:
            assert (said := self.run(line)) == "done", said

    def block(self) -> None:
        """Keeps the interpreter in a call of C until SIGINT, and returns when the call has begun.

        A request that comes before the call would be answered, or begun and not ended.
        """
        # A program that starts the tests may ignore the signal, and a child inherits that.
        self.do("import ctypes, signal; signal.signal(signal.SIGINT, signal.default_int_handler)")
        self.send("ctypes.PyDLL(None).sleep(3600)")
        call = Path(f"/proc/{self.pid}/syscall")
        until(lambda: call.read_text().split()[0] in SLEEPS, "the call began")

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def refused_until(rt: Runtime, name: str, says: str) -> None:
    """Requests the model until a refusal says so. It is refused each time."""

    def is_said() -> object:
        with pytest.raises(Busy) as refusal:
            rt.preload(name, timeout=0.5)
        return re.search(says, str(refusal.value))

    until(is_said, says)


def has_ended(pid: int) -> bool:
    """Whether the process has ended. A zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kind(ledger: str) -> str:
    """The kind of the ledger with this URL, as `soak` names it."""
    return "keeper" if ledger.startswith("keeper:") else "redis"


def counted(module: str, *words: object, **environment: str) -> dict[str, int]:
    """The counts that `python -m tests.stories.MODULE WORDS` prints as JSON. It has one process for itself."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.stories.{module}", *map(str, words)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernel_ext")))}
        | environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    return json.loads(ran.stdout.splitlines()[-1])
