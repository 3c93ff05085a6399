"""What this process measures of its memory: the size of its models, and what it holds beyond its leases.

The size of a model is estimated by `estimation.py` from what the source shows, and from the file of measurements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from .. import other_libraries
from ..devices.probe import Probe
from ..errors import GpuError
from ..estimation import CONTEXT_BYTES, footprint
from ..facts import HOST, Device, Evidence, Footprint, Lease, Measurement, ModelSpec, Shares
from ..telemetry.measurements import Measurements
from .resident import Resident

CONTENT_DIGITS = 12  # of a source's fingerprint, to compare sources in the ledger
_LEAST_INCREASE = 0.01  # a peak that is higher by a smaller fraction is not written again


class Sizing:
    """Computes the footprints of this process's models, and stores new measurements of them."""

    def __init__(
        self, measurements: Measurements, probe: Probe, wall: Callable[[], float] = time.time
    ) -> None:
        """`wall` returns epoch seconds."""
        self.measurements = measurements
        self.probe = probe
        self.wall = wall
        # By device: the bytes of the CUDA context as last seen, and when the driver had been measured
        self._contexts: dict[str, tuple[int, float]] = {}

    def footprint(self, resident: Resident, places: tuple[str, ...] = ()) -> Footprint:
        """The bytes that the model needs on a device: measured if it is loaded, else estimated.

        The estimate uses the measurement of an earlier load, if there is one. `places` are ids of
        the cards on which the model may be placed; empty means any card. Raises UnknownSize,
        NotAModel, LoadFailed, BadSetting.
        """
        spec = resident.spec
        handle = resident.handle  # read once: another thread may drop the model meanwhile
        evidence = self._require_evidence(resident, spec)
        if handle is not None:
            shares = resident.backend.measure(handle)
            if resident.handle is not handle:  # it was dropped before or while it was measured
                return self.footprint(resident, places)
            measured: Measurement | None = Measurement(sum(share.bytes for share in shares))
            working_bytes = resident.backend.working_bytes(handle)
            uses = [spec.options.get(option) for option in ("context_length", "sequences")]
            declared = spec.size if uses != [None, None] else None
        else:
            measured = resident.measured or self.measurements.of(spec, evidence)
            declared, working_bytes = spec.size, None
        return footprint(
            spec.name,
            evidence,
            declared=declared,
            measured=measured,
            working_bytes=working_bytes,
            options=spec.options,
            quantization=spec.quantization,
            context_bytes=0 if handle is not None else self._context(places, evidence.at_load),
        )

    def _require_evidence(self, resident: Resident, spec: ModelSpec) -> Evidence:
        """What the model's source shows of the model's size.

        Raises GpuError if the source shows nothing, the model is not loaded, and no size was given.
        """
        try:
            evidence = resident.backend.evidence(spec, resident.origin)
        except GpuError as error:
            if resident.handle is None and spec.size is None:
                raise
            evidence = Evidence(why_unknown=str(error))
        return replace(evidence, pieces=resident.pieces() or evidence.pieces)

    def learn(self, resident: Resident, shares: Shares) -> None:
        """Remembers the bytes of a model that was just loaded, and its peak while loading.

        `shares` are the bytes measured on each device.
        """
        size = sum(share.bytes for share in shares)
        peak_bytes = self._peak(shares)
        names = {device.id: device.name for device in self.probe.devices if not device.simulated}
        device = names.get(shares[0].device, "") if shares else ""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.wall()))
        evidence = self._evidence(resident)
        resident.content = evidence.fingerprint[:CONTENT_DIGITS]
        known = self.measurements.of(resident.spec, evidence)
        if known is not None and known.peak_bytes is not None and known.resident_bytes == size:
            peak_bytes = max(known.peak_bytes, peak_bytes or 0)
        measured = Measurement(size, peak_bytes, day, device, resident.spec.name)
        if not evidence.fingerprint:
            # Live Python code has no fingerprint, so the measurement is valid only for this
            # registration.
            resident.measured = measured
        elif known is None or replace(known, day=day) != measured:
            self.measurements.remember(resident.spec, evidence, measured)

    def saw(self, resident: Resident, *, alone: bool) -> None:
        """Stores the peak of a model that was used, if it is higher than the stored peak.

        `alone` is true if no other model was used since the last tick. Only then does torch's peak
        count, because torch has one peak for all models.
        """
        shares = resident.backend.measure(resident.handle) if resident.handle is not None else ()
        size = sum(share.bytes for share in shares)
        peak = max(size, (self._peak(shares) or 0) if alone else 0)
        evidence = self._evidence(resident)
        known = resident.measured or self.measurements.of(resident.spec, evidence)
        if known is None:
            return
        highest = max(known.peak_bytes or 0, known.resident_bytes)
        if peak <= highest * (1 + _LEAST_INCREASE):
            return
        measured = replace(known, peak_bytes=peak)
        if resident.measured:
            resident.measured = measured
        else:
            self.measurements.remember(resident.spec, evidence, measured)

    def saw_contexts(self, models: Iterable[Lease]) -> None:
        """Stores the bytes of a CUDA context once two measurements of the driver agree.

        One is not enough: torch's own figure is from now, and the driver's can be from before a load or a
        release. `models` are the leases of models in this process. If one of them, or another library, has an
        allocator of its own, its bytes cannot be told from a context, and nothing is stored.
        """
        if any(map(_has_own_allocator, models)):
            return
        contexts = self.probe.contexts()
        for device in self.probe.devices:
            size, measured_at = contexts.get(device.id, 0), self.probe.measured_at(device.id)
            before, earlier = self._contexts.get(device.id, (0, -math.inf))
            if measured_at <= earlier:
                continue
            self._contexts[device.id] = size, measured_at
            steady = size and size == before
            is_new = steady and size != self.measurements.context_bytes(device.name)
            if is_new and not other_libraries.held():
                self.measurements.remember_context(device.name, size)

    def _peak(self, shares: Shares) -> int | None:
        """The bytes of `shares`, plus how much higher torch's use was at its peak than it is now.

        None if torch's peak on one of the devices is not known.
        """
        peak = 0
        for share in shares:
            beyond = self.probe.beyond_now(share.device)
            if beyond is None:
                return None
            peak += share.bytes + beyond
        return peak if shares else None

    def _evidence(self, resident: Resident) -> Evidence:
        try:
            return resident.backend.evidence(resident.spec, resident.origin)
        except GpuError as error:  # the source was deleted after the load
            return Evidence(why_unknown=str(error))

    def _context(self, places: tuple[str, ...], own: bool = False) -> int:
        """Bytes of the CUDA context that a load onto one of the cards `places` may add.

        The result is zero if this process has a context on any of the cards, since the model may be
        placed there. An existing context counts as residue (memory of the process beyond its
        leases). If `own` is true, the model runs in an engine, which always makes its own context.
        """
        cards: list[Device] = []
        for device in self.probe.cards:
            if not device.simulated and (not places or device.id in places):
                cards.append(device)
        if not cards:
            return 0
        used = self.probe.used()
        if not own and any(used.get(card.id) for card in cards):
            return 0
        known = [self.measurements.context_bytes(card.name) for card in cards]
        return max(size or CONTEXT_BYTES for size in known)


IN_TORCH = ("torch", "transformers")  # backends whose bytes torch's allocator holds


def _has_own_allocator(lease: Lease) -> bool:
    return lease.kind == "model" and lease.backend not in IN_TORCH


def residue(
    leases: Iterable[Lease], used: Mapping[str, int], contexts: Mapping[str, int]
) -> dict[str, int]:
    """Maps each device to the bytes beyond the leases: context, reserved cache, the user's tensors.

    `used` maps devices to the bytes that the driver counts for this process. `contexts` maps
    devices to the bytes outside torch's allocator. A leased block of code adds no residue: the
    lease of the block already covers the memory that the code allocates.
    """
    leased: dict[str, int] = {}
    outside_torch = dict(contexts)  # a CUDA context is never part of a lease
    for lease in leases:
        for share in lease.shares:
            leased[share.device] = leased.get(share.device, 0) + share.bytes
            if _has_own_allocator(lease) and share.device in outside_torch:
                outside_torch[share.device] -= share.bytes
    found = {}
    for device, bytes_used in used.items():
        beyond = max(bytes_used - leased.get(device, 0), outside_torch.get(device, 0))
        if device != HOST and beyond > 0:
            found[device] = beyond
    return found
