"""A report to paste into an issue: versions, drivers, devices, ledger, settings, refusals.

The report contains no secrets. Each chapter is gathered separately. If a chapter fails, the report
shows the error in place of the chapter, because users need the report most when something fails.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

from ..attribution import name_of
from ..backends.torch_release import why_torch_moves_nothing
from ..devices import drivers
from ..errors import GpuError, ProbeFailed, first_line
from ..facts import DeviceView, Value
from ..files import file_system_of
from ..ledgers import host_config
from ..ledgers.access import access_to
from ..scheduler.capacity import views
from ..scheduler.caps import drained
from ..settings import Settings, masked
from ..units import counted, in_calendar, show_bytes
from . import status
from .history import recorded_events
from .session import Session

PACKAGES = (
    "gpu-console torch transformers accelerate safetensors nvidia-ml-py amdsmi msgspec "
    "psutil redis ipython ipykernel panel"
).split()
VARIABLES = (
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER NVIDIA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES "
    "ROCR_VISIBLE_DEVICES PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF SLURM_JOB_GPUS"
).split()
REFUSALS = 5  # how many of the last refusals, failures and drains the report has
REPORTED_ACTIONS = ("refused", "failed", "overstayed", "drained", "undrained")

_TOKEN = re.compile(r"\b(?:hf|sk|ghp|github_pat|glpat)[_-][A-Za-z0-9_-]{16,}")

Rows = list[tuple[str, str]]


class Chapter(Value):
    """A title and the rows below it. Each row is a name and its value."""

    title: str
    rows: tuple[tuple[str, str], ...]


class Report(Value):
    """The report of `gpu doctor`."""

    chapters: tuple[Chapter, ...]

    @property
    def text(self) -> str:
        """The report as aligned text, to be pasted."""
        blocks = []
        for chapter in self.chapters:
            width = max((len(name) for name, _ in chapter.rows), default=0)
            lines = [chapter.title]
            for name, value in chapter.rows:
                row = f"{name:{width}}  {value}".rstrip() if name else value
                lines.append(f"  {row}")
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)


def report(session: Session | None, error: GpuError | None = None) -> Report:
    """The report of `gpu doctor`.

    If the runtime does not open, `session` is None and `error` says why.
    """
    chapters = [_chapter("versions", _versions), _chapter("drivers", _drivers)]
    if error is not None:
        lines = tuple(("", line.strip()) for line in str(error).splitlines())
        chapters.append(Chapter("the runtime does not open", lines))
    if session is not None:
        chapters += [
            _chapter("devices", lambda: _devices(session)),
            _chapter("measured by", lambda: _helper(session)),
            _chapter("ledger", lambda: _ledger(session)),
            _chapter("last refusals, failures and drains", lambda: _refusals(session)),
        ]

    def settings() -> Settings:
        return Settings.load() if session is None else session.settings

    chapters += [
        _chapter("settings", lambda: _settings(settings())),
        _chapter("machine", lambda: _machine(settings())),
    ]
    return Report(tuple(_without_secrets(chapter) for chapter in chapters))


def _chapter(title: str, gather: Callable[[], Rows]) -> Chapter:
    try:
        return Chapter(title, tuple(gather()))
    except Exception as error:  # one broken chapter must not hide the rest
        reason = f"{type(error).__name__}: {first_line(error)}"
        return Chapter(title, (("not known", reason),))


def _without_secrets(chapter: Chapter) -> Chapter:
    rows: Rows = []
    for name, value in chapter.rows:
        rows.append((name, _TOKEN.sub("***", masked(value))))
    return Chapter(chapter.title, tuple(rows))


def _versions() -> Rows:
    kernel = f"{platform.system()} {platform.release()}"
    system = f"{kernel} {platform.machine()}"
    rows: Rows = [("python", f"{platform.python_version()} on {system}")]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:  # not installed: no row
            continue
    torch = sys.modules.get("torch")
    if torch is not None:  # torch is not imported here: that takes seconds, and memory on the card
        rows.append(("torch was built for", _build_of(torch)))
    if why := why_torch_moves_nothing():
        rows.append(("parking", f"off, and no model moves: {why}"))
    return rows


def _build_of(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    if getattr(torch.version, "hip", None):
        return f"ROCm {torch.version.hip}"
    return "the CPU"


def _drivers() -> Rows:
    """A row for each driver with its answer, then a row for each of VARIABLES that is set."""
    rows: Rows = []
    for name in drivers.SOURCES:
        source = drivers.source(name)
        title = f"{source.KIND} by {source.NAME}"
        try:
            answer = drivers.with_time_limit(source.NAME, partial(_answer_of, source))
        except ProbeFailed as error:
            answer = str(error).splitlines()[0]
        rows.append((title, answer))
    set_here = [name for name in VARIABLES if name in os.environ]
    return rows + [(name, os.environ[name] or "(empty)") for name in set_here]


def _answer_of(source: Any) -> str:
    try:
        listing = source.list_cards()
        if listing.absent:
            return listing.absent
        found = source.versions()
        versions = [f"{what} {version}" for what, version in found.items()]
    except drivers.NoAnswer as error:
        return f"fails: {error}"
    found = f"{len(listing.cards)} devices, {', '.join(versions)}"
    for number, why in listing.failed.items():
        found += f"; card {number}: {why}"
    return found


def _devices(session: Session) -> Rows:
    book, world = session.look()
    drained_by = drained(book, world)
    rows: Rows = []
    for view in views(book, world):
        words = _words_on(session, view)
        words.append(drained_by.get(view.device.id, ""))
        rows.append((view.device.id, ", ".join(word for word in words if word)))
    if trouble := status.snapshot(session).degraded:
        rows.append(("trouble", trouble))
    return rows


def _words_on(session: Session, view: DeviceView) -> list[str]:
    """The phrases that describe one device in the report; some of them can be empty."""
    device = view.device
    sample = view.sample
    words = [
        device.name,
        f"total {show_bytes(device.total_bytes)}",
        f"budget {show_bytes(view.limit_bytes)}",
        f"claimed {show_bytes(view.claimed_bytes)}",
        _free_of(view),
        str(view.level),
    ]
    if sample is not None:
        if sample.utilisation_percent is not None:
            words.append(f"{sample.utilisation_percent:.0f} % busy")
        if sample.temperature_celsius is not None:
            words.append(f"{sample.temperature_celsius:.0f} °C")
        if sample.power_watts is not None:
            words.append(f"{sample.power_watts:.0f} W")
    if not device.is_host and not device.simulated:
        seen = device in session.probe.devices
        here = f"{session.probe.place(device.id).torch} in torch here" if seen else ""
        words += [device.uuid, here or "not seen by this process"]
    if device.unified:
        words.append("shares the machine's memory")
    return words


def _free_of(view: DeviceView) -> str:
    sample = view.sample
    known = sample is not None and sample.free_bytes is not None
    if not view.device.simulated and not known:
        return "free not known"
    return f"free {show_bytes(sample.free_bytes)}" if sample else ""


def _helper(session: Session) -> Rows:
    if session.probe.simulated:
        return [("", "nothing: the devices are simulated")]
    helper = list(session.probe.helper().items())
    return helper or [("", "this process: the ledger is in memory")]


def _ledger(session: Session) -> Rows:
    ledger = session.ledger
    book = session.ledger.read()
    rows: Rows = [("where", ledger.url)]
    directory = getattr(ledger, "directory", None)
    if directory is not None:
        group = access_to(directory).group
        private = "nobody: it is private to this user"
        rows.append(("file system", file_system_of(directory)))
        rows.append(("shared by", private if group is None else f"group {group}"))
    dead = ledger.dead(book)
    lost = ledger.unknown(book)
    owners = str(len(book.sections))
    if dead:
        owners += f", {len(dead)} of them dead"
    rows += [
        ("owners", owners),
        ("leases and tickets", f"{book.entries} ({counted(len(book.tickets), 'ticket')})"),
        ("events so far", str(book.seq)),
        ("ghosts", str(len(book.ghosts))),
    ]
    for id, section in book.sections.items():
        owner = section.owner
        me = " (this process)" if id == session.me else ""
        gone = ", dead" if id in dead else ""
        if id in lost:
            gone = f", nothing proves that it lives or has ended: gpu evict {owner.pid} --lost"
        value = f"{counted(len(section.leases), 'lease')}, user {owner.user}{me}{gone}"
        rows.append((owner.label, value))
    return rows


def _refusals(session: Session) -> Rows:
    found = [event for event in recorded_events(session) if event.action in REPORTED_ACTIONS]
    rows: Rows = []
    for event in found[-REFUSALS:]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(in_calendar(event.wall)))
        what = f"{event.title} {event.action}"
        text = f"{what} ({event.reason}): {event.because}"
        rows.append((when, text))
    return rows or [("", "none")]


def _settings(settings: Settings) -> Rows:
    rows: Rows = []
    for row in settings.sources():
        source = "" if row.source == "default" else f"  ({row.source})"
        rows.append((row.name, f"{row.value}{source}"))
    return rows


def _machine(settings: Settings) -> Rows:
    file = settings.gpu_config_file
    if not os.path.exists(file):
        return [(file, "does not exist")]
    known = host_config.read(file)
    user = name_of(os.geteuid())
    groups = host_config.groups_of(user)
    cap = known.cap(user, groups)
    limits = "none"
    if cap:
        tables = cap.tables.items()
        names = [f"[{table}] {key}" for key, table in tables]
        limits = ", ".join(names)
    return [
        (file, f"ledger {known.ledger or 'not named'}"),
        (f"caps on {user}", limits),
        (f"{user} is", "an operator" if known.is_operator(user, groups) else "no operator"),
    ]
