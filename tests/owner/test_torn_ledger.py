"""The files of a runtime's ledger are damaged. Each public method still returns, or raises an error in words."""

import faulthandler
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas  # noqa: F401 - imported here, since another user may not be able to read the interpreter's files
import pytest

import gpu_runtime.owner.status  # noqa: F401 - as above
from gpu_runtime import GpuError, Runtime
from gpu_runtime.facts import Level, Moment
from gpu_runtime.telemetry.recorder import record_in

REPLACE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.touch(),
    "nonsense": lambda path: path.write_bytes(b"nonsense" * 2000),
    "a pipe": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "a link": lambda path: path.symlink_to("/dev/zero"),
}
DEEDS = ["delete", "rename", "chmod", *(f"replace by {what}" for what in REPLACE)]
FILES = ["directory", "..", "keeper.sock", "keeper.log", "keeper.starting"]
MOMENT = Moment(5.0, "sim:0", 8, 8, 4, Level.LOW)
CALLS: tuple[tuple[str, ...], ...] = (
    ("status",), ("models",), ("leases",), ("events",), ("evictions",), ("history",), ("specs",),
    ("decisions",), ("doctor",), ("health",), ("fragmentation",), ("who",), ("tick",),
    ("use", "m"), ("lease", "1GiB"), ("evict", "m"), ("preload", "m"), ("pin", "m"), ("unpin", "m"),
    ("plan", "m"), ("why", "m"), ("forget", "m"), ("close",),
)  # fmt: skip
BESIDE = ["sampler.lock", "sampler.bell", "../measured.json", "../measured.lock"]
BESIDE += ["../journal.db", "../journal.db-journal", "../history.db", "../history.db-journal"]
# the others only in a soak
ALWAYS = ("directory", "keeper.sock", "../journal.db-journal", "../history.db-journal")


def harm(deed: str, path: Path) -> None:
    """Damages a file as `deed` says. Nothing happens if the damage is impossible."""
    with suppress(OSError):
        if deed == "rename":
            path.rename(path.with_name(f"{path.resolve().name}.away"))
        elif deed == "chmod":
            path.chmod(0)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=deed.startswith("replace"))
        if deed.startswith("replace by "):
            REPLACE[deed.removeprefix("replace by ")](path)


@contextmanager
def without_warnings() -> Iterator[None]:
    """The files are reported as damaged."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """If the block does not end within `seconds`, prints where it hangs and ends this process."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def a_directory() -> Iterator[Path]:
    """A new directory that another user can reach. It is removed at the end."""
    made = Path(tempfile.mkdtemp(prefix="torn-"))
    made.chmod(0o777)
    try:
        yield made
    finally:
        for place, directories, _ in os.walk(made):  # an attack may have closed some of them
            for name in directories:
                os.chmod(os.path.join(place, name), 0o700, follow_symlinks=False)
        shutil.rmtree(made, ignore_errors=True)


def raw_errors(deed: str, target: str) -> list[str]:
    """Damages `target` as `deed` says. Returns the calls that then raised anything but a GpuError."""
    found = []
    with a_directory() as root, ends_within(60), without_warnings():
        given = {"ledger": f"keeper://{root}/ledger", "gpu_config_file": f"{root}/none.toml"}
        rt, other = (
            Runtime(devices="sim:8GiB,host:8GiB", monitor=False, **given) for _ in range(2)
        )
        for each in (rt, other):
            each._session.ledger.patience_seconds = 0.2
        rt.register("m", backend="fake", size="1GiB")
        rt.preload("m")
        record_in(rt._session.ledger.directory).append([MOMENT])
        here = rt._session.ledger.directory
        harm(deed, here if target == "directory" else here / target)
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
    """A transaction raised PermissionError."""
    assert [one for deed in DEEDS for one in raw_errors(deed, target)] == []
