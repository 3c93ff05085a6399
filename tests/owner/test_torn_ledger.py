"""The files of a runtime's ledger are damaged. Each public method still returns, or raises an error in words."""

import logging
from types import SimpleNamespace

import pandas  # noqa: F401 - imported here, since another user may not be able to read the interpreter's files
import pytest

import gpu_runtime.owner.dataframes  # noqa: F401 - as above
from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import Level, Moment
from gpu_runtime.telemetry.recorder import record_in
from tests.ledgers.tearing import DEEDS, FILES, a_directory, as_nobody, ends_within, harm_a_file

MOMENT = Moment(5.0, "sim:0", 8, 8, 4, Level.LOW)
CALLS: tuple[tuple[str, ...], ...] = (
    ("status",), ("models",), ("leases",), ("events",), ("evictions",), ("history",), ("specs",),
    ("decisions",), ("doctor",), ("health",), ("fragmentation",), ("who",), ("tick",),
    ("use", "m"), ("lease", "1GiB"), ("evict", "m"), ("preload", "m"), ("pin", "m"), ("unpin", "m"),
    ("plan", "m"), ("why", "m"), ("forget", "m"), ("close",),
)  # fmt: skip
BESIDE = ["ballast", "sampler.lock", "sampler.bell", "../measured.json", "../measured.lock"]
BESIDE += ["../journal.db", "../journal.db-journal", "../history.db", "../history.db-journal"]
# the others only in a soak
ALWAYS = ("directory", "owners", "../journal.db-journal", "../history.db-journal")


def raw_errors(deed: str, target: str) -> list[str]:
    """Damages `target` as `deed` says. Returns the calls that then raised anything but a GpuError."""
    found = []
    logging.disable(logging.WARNING)  # the files are reported as damaged
    with a_directory() as root, ends_within(60):
        given = {"ledger": f"sqlite://{root}/ledger", "gpu_config_file": f"{root}/none.toml"}
        rt, other = (
            Runtime(devices="sim:8GiB,host:8GiB", monitor=False, **given) for _ in range(2)
        )
        for each in (rt, other):
            each._session.ledger.patience_seconds = 0.2
        rt.register("m", backend="fake", size="1GiB")
        rt.preload("m")
        record_in(rt._session.ledger.directory).append([MOMENT])
        ours, theirs = (SimpleNamespace(ledger=each._session.ledger) for each in (rt, other))
        harm_a_file(deed, target, ours, theirs)
        for name, *arguments in CALLS:
            try:
                answer = getattr(rt, name)(*arguments)
                if name in ("use", "lease"):
                    with answer:
                        pass
            except GpuError:
                pass
            except Exception as error:  # noqa: BLE001 - reported
                found.append(f"{deed} {target}: {name}: {type(error).__name__}: {error}")
        other.close()
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=[] if target in ALWAYS else pytest.mark.soak)
        for target in [*FILES, *BESIDE]
    ],
)
def test_no_call_raises_an_error_of_the_system_when_a_file_is_torn_away(target):
    """As another user, since file modes do not bind root. A transaction raised PermissionError."""
    assert as_nobody(lambda: [one for deed in DEEDS for one in raw_errors(deed, target)]) == []
