"""Log lines whose exact text must not change, because operators search logs for them.

The lines come from the Semantik governor, a memory manager whose features this project continues.
"""

from __future__ import annotations

import logging

from ..facts import Event, ModelSpec
from ..units import MIB

log = logging.getLogger("gpu_runtime")


def log_event(event: Event, spec: ModelSpec | None) -> None:
    """Logs what happened to a model of this process. `spec` is None if the model was forgotten."""
    key = spec.key if spec else event.model
    short = f"{spec.model_type}:{event.model}" if spec else event.model
    if event.action == "granted":
        log.info("Memory request approved: %s needs %dMB", key, event.bytes // MIB)
    elif event.action == "offloaded":
        log.info("Offloaded %s to CPU (freed %dMB GPU)", short, event.bytes // MIB)
    elif event.action == "restored":
        log.info("Restored %s from CPU to GPU", short)
    else:
        log.debug("%s %s: %s", event.action, event.model, event.because)
