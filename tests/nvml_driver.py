"""A fake driver for the real NVML binding, and processes whose runtimes use the cards of this driver.

The library is built once with gcc from `fake_nvml.c`. A file describes its cards. A test replaces this file while
processes run. A conftest imports the fixtures `library`, `driver` and `host`.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpu_runtime.devices.sampler_client import Figures, Sampling
from tests.clock import PATIENCE, until


class Driver:
    """The cards of the fake driver, described by a file. Each change replaces the whole file."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.state = directory, directory / "cards"
        self.lines: dict[str, str] = {"count": "1"}
        self.set()

    def set(self, **lines: Any) -> None:
        """Changes lines of the file: `set(_0_free=5, _0_1_free=4, all_hang=None)`. None removes a line."""
        for key, value in lines.items():
            name = re.sub(r"(\d|^all)_", r"\1.", key.lstrip("_"))
            self.lines.pop(name, None)
            if value is not None:
                self.lines[name] = str(value)
        draft = self.state.with_suffix(".new")
        draft.write_text("".join(f"{key} {value}\n" for key, value in self.lines.items()))
        draft.replace(self.state)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make a process load the fake library with this driver's file."""
        return {"LD_LIBRARY_PATH": str(self.directory), "FAKE_NVML": str(self.state)}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the fake library."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc, to build the fake driver")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([
        "gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o",
        path, source,
    ], check=True)  # fmt: skip
    return path


@pytest.fixture
def driver(library: Path, tmp_path: Path) -> Driver:
    """The fake driver, with one card."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / library.name).symlink_to(library)
    return Driver(tmp_path / "driver")


class Kernel:
    """A process with a runtime on the driver's cards. It evaluates Python that a test sends."""

    def __init__(
        self, driver: Driver, ledger: str, devices: str = "cuda", **environment: str
    ) -> None:
        program = textwrap.dedent(f"""
            import json, sys, time
            from gpu_runtime import Runtime
            rt = Runtime(devices={devices!r}, ledger={ledger!r}, eviction_grace_seconds=0)
            print(json.dumps("ready"), flush=True)
            for line in sys.stdin:
                try:
                    try:
                        answer = eval(line, globals())
                    except SyntaxError:
                        answer = exec(line, globals())
                except BaseException as error:
                    answer = f"{{type(error).__name__}}: {{error}}"
                print(json.dumps(answer, default=repr), flush=True)
        """)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True, env={**os.environ, **driver.environment, **environment},
        )  # fmt: skip
        assert self.read_answer() == "ready"

    def read_answer(self) -> Any:
        """Waits for the answer to the oldest line that has no answer yet, and returns it."""
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def send(self, line: str) -> None:
        """Sends an expression or a statement to the process, without waiting for the answer."""
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def evaluate(self, line: str) -> Any:
        """Sends a line and returns the value of the expression, None for a statement, or the error's text."""
        self.send(line)
        return self.read_answer()

    @property
    def degraded(self) -> str:
        """Why the runtime of the process is degraded. Empty if it is not."""
        return self.evaluate("rt.status().degraded")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)


class Host:
    """One ledger, the kernels that use it, and their helper process, which samples the cards."""

    def __init__(self, driver: Driver, directory: Path) -> None:
        self.driver, self.url, self.kernels = driver, f"keeper://{directory}/ledger", list[Kernel]()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.directory = directory / "ledger" / boot
        self.sampling = Sampling(self.directory)

    def kernel(self, devices: str = "cuda", **environment: str) -> Kernel:
        """Starts a kernel that uses this ledger.

        On a busy machine the kernel is ready before the cards are measured, so `cuda` is waited for.
        """
        self.kernels.append(Kernel(self.driver, self.url, devices, **environment))
        if devices == "cuda":
            self.figures()
        return self.kernels[-1]

    def helper(self) -> int:
        """The pid of the only helper. A second one, which another kernel has started meanwhile, ends by itself."""
        return until(lambda: self.helpers() == [found := self.figures().pid] and found)

    def helpers(self) -> list[int]:
        """The pids of the helper processes of this ledger."""
        every = ((one.pid, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
        module, place = "gpu_runtime.telemetry.sampler", str(self.directory)
        return [pid for pid, words in every if module in words and words[-1] == place]

    def figures(self) -> Figures:
        """The latest sample that the helper process wrote. Waits for the first one."""
        return until(self.sampling.figures, "no helper has measured the cards")

    def end(self) -> None:
        for kernel in self.kernels:
            kernel.end()
        for pid in self.helpers():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def host(driver: Driver, tmp_path: Path) -> Iterator[Host]:
    """A host with an empty ledger. Its processes end with the test."""
    made = Host(driver, tmp_path)
    yield made
    made.end()
