"""How large a model of this process is: the estimate, fed with its source's evidence and with what was measured.

The estimate decides (`estimate.py`); the backends and the file of measurements know. Here they meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ..devices.probe import Probe
from ..errors import GpuError
from ..estimation.footprint import CONTEXT_BYTES, footprint
from ..facts import HOST, Evidence, Footprint, Measurement, Shares
from ..telemetry.measurements import Measurements
from .resident import Resident

_WORTH_TELLING = 0.01  # a peak that is higher by less is not written down again


class Sizing:
    """Footprints of this process's models, and what is learnt from loading them."""

    def __init__(
        self, measurements: Measurements, probe: Probe, wall: Callable[[], float] = time.time
    ) -> None:
        self.measurements, self.probe, self.wall = measurements, probe, wall
        self._contexts: dict[str, int] = {}  # at the last look

    def footprint(
        self,
        resident: Resident,
        places: tuple[str, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Footprint:
        """The bytes that it needs on a device: those it has where it is loaded, else the best that is known.

        `places` are the cards it may go to; empty: any. `options` stand in the place of its own, for a plan.
        Raises UnknownSize, NotAModel, LoadFailed, BadSetting.
        """
        spec = (
            replace(resident.spec, options={**resident.spec.options, **options})
            if options
            else resident.spec
        )
        asked = any(
            spec.options.get(option) is not None for option in ("context_length", "sequences")
        )
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
        return footprint(
            spec.name,
            evidence,
            declared=declared,
            measured=measured,
            options=spec.options,
            quantization=spec.quantization,
            context_bytes=0
            if resident.handle is not None
            else self._context(places, evidence.at_load),
        )

    def learn(self, resident: Resident, shares: Shares) -> None:
        """Remembers what a model takes, now that it is loaded, and what it took on the way."""
        size = sum(share.bytes for share in shares)
        peak_bytes = self._peak(shares)
        names = {device.id: device.name for device in self.probe.devices if not device.simulated}
        device = names.get(shares[0].device, "") if shares else ""
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

    def saw(self, resident: Resident, *, alone: bool) -> None:
        """Remembers a new peak of a model that was used; torch's own counts where no other was used meanwhile."""
        shares = resident.backend.measure(resident.handle) if resident.handle is not None else ()
        size = sum(share.bytes for share in shares)
        peak = max(size, (self._peak(shares) or 0) if alone else 0)
        evidence = self._evidence(resident)
        known = resident.measured or self.measurements.of(resident.spec, evidence)
        if known is None or peak <= max(known.peak_bytes or 0, known.resident_bytes) * (
            1 + _WORTH_TELLING
        ):
            return
        if resident.measured:
            resident.measured = replace(known, peak_bytes=peak)
        else:
            self.measurements.remember(resident.spec, evidence, replace(known, peak_bytes=peak))

    def saw_contexts(self) -> None:
        """Remembers what a CUDA context takes, once two looks in a row agree: the driver is a little late."""
        contexts = self.probe.contexts()
        for device in self.probe.devices:
            size = contexts.get(device.id, 0)
            if (
                size
                and size == self._contexts.get(device.id)
                and size != self.measurements.context_bytes(device.name)
            ):
                self.measurements.remember_context(device.name, size)
        self._contexts = contexts

    def _peak(self, shares: Shares) -> int | None:
        """Its bytes and the most that torch held beyond what it holds now, on its cards; None: nothing tells."""
        beyond = [self.probe.beyond_now(share.device) for share in shares]
        return (
            None
            if not beyond or None in beyond
            else sum(share.bytes for share in shares) + sum(beyond)
        )

    def _evidence(self, resident: Resident) -> Evidence:
        try:
            return resident.backend.evidence(resident.spec, resident.origin)
        except GpuError as error:  # its source has gone since it was loaded
            return Evidence(why_unknown=str(error))

    def _context(self, places: tuple[str, ...], own: bool = False) -> int:
        """What a first use of these cards will take beyond the model: the CUDA context.

        Nothing where this process has one on any of them already, since it may be that card it goes to; a second
        card's shows as residue once it is there. An engine has one of its `own`, whatever this process has.
        """
        cards = {
            device.id: device.name
            for device in self.probe.devices
            if not device.simulated and device.id != HOST and (not places or device.id in places)
        }
        used = self.probe.used() if cards else {}
        if not cards or not own and any(used.get(card) for card in cards):
            return 0
        return max(
            self.measurements.context_bytes(name) or CONTEXT_BYTES for name in cards.values()
        )
