"""Opens this process as an owner: its ledger, devices, journal and records."""

from __future__ import annotations

from collections.abc import Callable

from ..catalog.store import Catalogued
from ..devices.probe import Probe, check_index
from ..devices.sampler_client import Sampling
from ..ledgers import host_config, open_ledger
from ..ledgers.access import default_url, journals_in, shared_url, slug_of
from ..notebook import notebook_path
from ..scheduler import transitions
from ..settings import Settings
from ..telemetry.journal import Journal
from ..telemetry.measurements import Measurements, measurements_in
from ..telemetry.recorder import record_in
from .look_ahead import LookAhead
from .session import Session


def open_session(
    settings: Settings,
    probe: Probe,
    catalogue: Catalogued,
    *,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Session:
    """A new owner in the ledger that `settings` name, with the devices of `probe`.

    `clock` returns seconds of CLOCK_BOOTTIME, `wall` epoch seconds. Raises BadSetting and
    LedgerUnavailable.
    """
    known = host_config.read(settings.gpu_config_file)
    slug = slug_of(probe.devices if probe.simulated else ())
    url = settings.gpu_ledger or shared_url(known.ledger, slug) or default_url(slug)
    ledger = open_ledger(url, notebook=notebook_path())
    try:
        probe.rename(transitions.device_names(probe.devices, ledger.read()))
        check_index(settings.inference_gpu_index, probe.devices)
    except BaseException:
        ledger.close()
        raise
    # The ledger's directory is for this boot. State that survives a reboot is in its parent.
    directory = getattr(ledger, "directory", None)
    state = directory.parent if directory else None
    probe.follow(directory, url)
    recording = None
    if directory and probe.simulated:  # these cards are not measured, but their use is recorded too
        recording = Sampling(directory, url, simulated=True)
    session = Session(
        ledger,
        probe,
        settings,
        Journal(*journals_in(state)) if state else Journal(),
        clock=clock,
        wall=wall,
        catalogue=catalogue,
        machine=known,
        measurements=Measurements(measurements_in(state) if state else None),
        record=record_in(directory) if directory else None,
        recording=recording,
    )
    session.look_ahead = LookAhead(session)
    return session
