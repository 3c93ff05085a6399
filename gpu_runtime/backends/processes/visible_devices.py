"""Which cards another process sees: the variables of its environment, from the shares of a lease."""

from __future__ import annotations

from ...devices.probe import Probe
from ...facts import HOST, Shares

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def card_environment(probe: Probe, shares: Shares) -> dict[str, str]:
    """Just the cards of these shares, in their order, and none of any other make.

    By UUID where the driver tells one, since a number means another card in a process that sees others. A simulated
    card is no card: what runs on it sees none.
    """
    devices = {device.id: device for device in probe.devices}
    seen: dict[str, list[str]] = {"CUDA_VISIBLE_DEVICES": [], "HIP_VISIBLE_DEVICES": []}
    for share in shares:
        device = devices[share.device]
        variable = _VISIBLE.get(device.id.partition(":")[0])
        if variable and device.id != HOST:
            seen[variable].append(
                device.uuid if variable.startswith("CUDA") and device.uuid else str(device.index)
            )
    return {name: ",".join(words) for name, words in seen.items()}
