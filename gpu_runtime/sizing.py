"""How large a model of this process is: the estimate, fed with its source's evidence and with what was measured.

The estimate decides (`estimate.py`); the backends and the file of measurements know. Here they meet.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from .errors import GpuError
from .estimate import CONTEXT_BYTES, footprint
from .facts import HOST, Evidence, Footprint, Measurement, Shares
from .measurements import Measurements
from .pool import Resident
from .probe import Probe


class Sizing:
    """Footprints of this process's models, and what is learnt from loading them."""

    def __init__(self, measurements: Measurements, probe: Probe, wall: Callable[[], float] = time.time) -> None:
        self.measurements, self.probe, self.wall = measurements, probe, wall

    def footprint(self, resident: Resident, places: tuple[str, ...] = (),
                  options: dict[str, Any] | None = None) -> Footprint:
        """The bytes that it needs on a device: those it has where it is loaded, else the best that is known.

        `places` are the cards it may go to; empty: any. `options` stand in the place of its own, for a plan.
        Raises UnknownSize, NotAModel, LoadFailed, BadSetting.
        """
        spec = replace(resident.spec, options={**resident.spec.options, **options}) if options else resident.spec
        asked = any(spec.options.get(option) is not None for option in ("context_length", "sequences"))
        try:
            evidence = resident.backend.evidence(spec, resident.origin)
        except GpuError as error:
            if resident.handle is None and spec.size is None:
                raise
            evidence = Evidence(why_unknown=str(error))
        evidence = replace(evidence, pieces=resident.pieces() or evidence.pieces)
        if resident.handle is not None:
            held = sum(share.bytes for share in resident.backend.measure(resident.handle))
            measured, declared = Measurement(held), spec.size if asked else None
        else:
            measured = resident.measured or self.measurements.of(spec, evidence)
            declared = spec.size
        return footprint(spec.name, evidence, declared=declared, measured=measured, options=spec.options,
                         quantization=spec.quantization,
                         context_bytes=0 if resident.handle is not None else self._context(places))

    def learn(self, resident: Resident, shares: Shares, peak_bytes: int | None = None) -> None:
        """Remembers what a model takes, now that it is loaded."""
        size = sum(share.bytes for share in shares)
        device = next((d.name for d in self.probe.devices if shares and d.id == shares[0].device and not d.simulated), "")
        day = time.strftime("%Y-%m-%d", time.gmtime(self.wall()))
        evidence = self._evidence(resident)
        known = self.measurements.of(resident.spec, evidence)
        if known is not None and known.peak_bytes is not None and known.resident_bytes == size:
            peak_bytes = max(known.peak_bytes, peak_bytes or 0)
        measured = Measurement(size, peak_bytes, day, device, resident.spec.name)
        if not evidence.fingerprint:  # live Python: known again only by this very registration
            resident.measured = measured
        elif known is None or replace(known, day=day) != measured:
            self.measurements.remember(resident.spec, evidence, measured)
        for card, size in self.probe.contexts().items():
            name = next(device.name for device in self.probe.devices if device.id == card)
            if size and self.measurements.context_bytes(name) is None:
                self.measurements.remember_context(name, size)

    def _evidence(self, resident: Resident) -> Evidence:
        try:
            return resident.backend.evidence(resident.spec, resident.origin)
        except GpuError as error:  # its source has gone since it was loaded
            return Evidence(why_unknown=str(error))

    def _context(self, places: tuple[str, ...]) -> int:
        """What a first use of these cards will take beyond the model: the CUDA context.

        Nothing where this process has one on any of them already, since it may be that card it goes to; a second
        card's shows as residue once it is there.
        """
        cards = {device.id: device.name for device in self.probe.devices
                 if not device.simulated and device.id != HOST and (not places or device.id in places)}
        if not cards or any(self.probe.contexts().get(card) for card in cards):
            return 0
        return max(self.measurements.context_bytes(name) or CONTEXT_BYTES for name in cards.values())
