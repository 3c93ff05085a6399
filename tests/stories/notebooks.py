"""Real kernels of notebooks with `%load_ext gpu`, and where their memory is by the book."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jupyter_client.manager import KernelManager

from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import HOST, Lease
from tests.clock import PATIENCE, scaled, until

ROOT = Path(__file__).parents[2]
CARD = "sim:0"
DEVICES = "sim:48MiB,host:2GiB"


def paths() -> str:
    """The PYTHONPATH of a kernel."""
    found = str(ROOT), str(ROOT / "kernel_ext"), os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, found))


class Notebook:
    """A real kernel, which has loaded the extension unless `loads` is false. It ends with the `with` block."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        loads: bool = True,
        options: Mapping[str, Any] = MappingProxyType({}),
        words: Sequence[str] = (),
        **settings: str,
    ) -> None:
        """`options` are those of `KernelManager.start_kernel`, and `words` those after `python` in its command."""
        self.name = name
        environment = {
            "PYTHONPATH": paths(),
            "GPU_LEDGER": url,
            "GPU_DEVICES": DEVICES,
            "JPY_SESSION_NAME": f"/work/{name}",
            "EVICTION_GRACE_SECONDS": "0",
        }
        # A free TCP port, chosen before the kernel binds it, may be taken by another kernel meanwhile.
        self._place = tempfile.TemporaryDirectory(prefix="kernel-")
        self.manager = KernelManager(transport="ipc", ip=f"{self._place.name}/ipc")
        if words:
            assert self.manager.kernel_spec is not None
            self.manager.kernel_spec.argv[1:] = words
        self.manager.start_kernel(env=os.environ | environment | settings, **options)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        if loads:
            self.run("%load_ext gpu")

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def run(self, code: str, *, stays: bool = False) -> str:
        """Runs a cell. Returns what it printed, displayed or raised, as text.

        With `stays`, a later text that replaces a displayed one counts in its place, as on the screen.
        """
        while True:
            shown: list[str] = []
            places: dict[str, int] = {}  # id of a display -> its place in `shown`

            def show(
                message: dict[str, Any],
                shown: list[str] = shown,
                places: dict[str, int] = places,
            ) -> None:
                content = message["content"]
                id = content.get("transient", {}).get("display_id", "")
                if message["msg_type"] == "stream":
                    shown.append(content["text"])
                elif message["msg_type"] in ("display_data", "execute_result"):
                    places[id] = len(shown)
                    shown.append(content["data"]["text/plain"])
                elif message["msg_type"] == "update_display_data" and stays:
                    shown[places[id]] = content["data"]["text/plain"]
                elif message["msg_type"] == "error":
                    shown.append("\n".join(content["traceback"]))

            done = self.client.execute_interactive(code, timeout=scaled(90), output_hook=show)
            # For a moment after a failed cell, a kernel aborts cells.
            if done["content"]["status"] != "aborted":
                return "\n".join(filter(None, shown) if stays else shown)

    def reply(self, message: str, channel: str = "shell") -> dict[str, Any]:
        """The content of the reply to the message with that id."""
        while True:
            found = getattr(self.client, f"{channel}_channel").get_msg(timeout=PATIENCE)
            if found["parent_header"].get("msg_id") == message:
                return found["content"]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._place.cleanup()

    def __enter__(self) -> Notebook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def leases(rt: Runtime, notebook: str) -> list[Lease]:
    """The leases of the kernel of that notebook."""
    return [
        lease
        for section in rt.status().sections.values()
        if section.owner.notebook.endswith(f"/{notebook}")
        for lease in section.leases
    ]


def places(rt: Runtime, notebook: str = "one.ipynb") -> set[str]:
    """The devices on which the kernel of that notebook holds memory."""
    return {share.device for lease in leases(rt, notebook) for share in lease.shares}


def held_bytes(rt: Runtime, notebook: str) -> int:
    """The bytes that the kernel of that notebook holds on the card and in RAM."""
    return sum(share.bytes for lease in leases(rt, notebook) for share in lease.shares)


def rest(rt: Runtime, notebook: str = "one.ipynb", least_bytes: int = 1) -> None:
    """Waits until the notebook holds memory on the card and is idle. Its cells are counted after their end."""

    def is_idle() -> bool:
        held = leases(rt, notebook)
        idle = not any(lease.pins for lease in held)
        return idle and places(rt, notebook) == {CARD} and held_bytes(rt, notebook) >= least_bytes

    until(is_idle, f"{notebook} is idle on the card")


def asked_to_park(
    rt: Runtime, is_enough: Callable[[str], object], notebook: str = "one.ipynb"
) -> str:
    """The first answer to a request to park, or its refusal, for which `is_enough` is true."""
    answer = ""

    def is_given() -> object:
        nonlocal answer
        try:
            answer = str(rt.park(notebook))
        except GpuError as error:  # the end of its last cell is published within a second
            answer = str(error)
        return is_enough(answer)

    try:
        until(is_given)
    except AssertionError as late:
        raise AssertionError(f"the last answer: {answer}") from late
    return answer


def park(rt: Runtime, notebook: str = "one.ipynb") -> None:
    """Parks the notebook as soon as it is idle."""
    asked_to_park(rt, lambda _: places(rt, notebook) == {HOST}, notebook)
