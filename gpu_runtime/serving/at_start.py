"""Loads the models that `tasks.yaml` names under `preload`, one after the other, when the server has started."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .health.blame import first_line
from .queue.keep_warm import stay_warm_seconds

if TYPE_CHECKING:
    from .gateway import Gateway

log = logging.getLogger("gpu_runtime")


async def preload(gateway: Gateway) -> None:
    """Loads the models under `preload` through the queue of `gateway`, as calls do.

    Each model stays warm for the usual time. A model that cannot be loaded is logged, and the next one is loaded.
    """
    for name in gateway.serving.preload:
        try:
            spec = gateway.rt.spec(gateway.serving.aliases.get(name, name))
            async with gateway.queue.turn(spec.name, spec.importance):
                pass
        except Exception as error:  # any error of an engine
            log.warning("%s was not loaded at the start: %s", name, first_line(error))
            continue
        if not spec.keep:
            seconds = stay_warm_seconds(spec.keep_alive or None, spec.model_type)
            gateway.keep_warm.keep(spec.name, seconds)
        log.info("%s was loaded at the start", name)
