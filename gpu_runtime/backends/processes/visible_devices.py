"""The environment variables that limit a child process to the cards of its lease."""

from __future__ import annotations

from ...devices.probe import Probe
from ...facts import HOST, Shares

_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def card_environment(probe: Probe, shares: Shares) -> dict[str, str]:
    """Variables with which a process sees only the cards of `shares`, in their order.

    `probe` knows the devices. A CUDA card is named by UUID if the driver reports one, because the
    number of a card differs between processes that see different cards. If all cards of `shares`
    are simulated, the process sees no card.
    """
    devices = {device.id: device for device in probe.devices}
    visible: dict[str, list[str]] = {"CUDA_VISIBLE_DEVICES": [], "HIP_VISIBLE_DEVICES": []}
    for share in shares:
        device = devices[share.device]
        variable = _VARIABLES.get(device.id.partition(":")[0])
        if variable is None or device.id == HOST:
            continue
        by_uuid = variable.startswith("CUDA") and device.uuid
        visible[variable].append(device.uuid if by_uuid else str(device.index))
    return {variable: ",".join(names) for variable, names in visible.items()}
