"""One report to paste into an issue: versions, drivers, devices, ledger, settings, last refusals. No secrets.

Each chapter is gathered by itself, and where one cannot be, its reason stands in its place: a report is wanted most
where something does not open.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from ..devices import drivers
from ..errors import GpuError, ProbeFailed
from ..facts import Value
from ..ledgers import host_config
from ..ledgers.access import access_to
from ..ledgers.liveness import name_of
from ..ledgers.sqlite import files
from ..scheduler.drain import drained
from ..scheduler.explain import first_line
from ..scheduler.pressure import views
from ..settings import Settings, masked
from ..units import show_bytes
from . import status
from .session import Session

PACKAGES = (
    "gpu-console",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "nvidia-ml-py",
    "amdsmi",
    "msgspec",
    "pydantic-settings",
    "psutil",
    "redis",
    "ipython",
    "ipykernel",
    "panel",
)
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "SLURM_JOB_GPUS",
)
REFUSALS = 5
TELLING = ("refused", "failed", "overstayed", "drained", "undrained")


class Chapter(Value):
    """A title, and its rows: what, and how it is."""

    title: str
    rows: tuple[tuple[str, str], ...]


class Report(Value):
    """What `gpu doctor` found."""

    chapters: tuple[Chapter, ...]

    @property
    def text(self) -> str:
        """Aligned, as it is pasted."""
        blocks = []
        for chapter in self.chapters:
            width = max((len(what) for what, _ in chapter.rows), default=0)
            rows = (
                f"{what:{width}}  {how}".rstrip() if what else how for what, how in chapter.rows
            )
            blocks.append("\n".join([chapter.title, *(f"  {row}" for row in rows)]))
        return "\n\n".join(blocks)


Rows = list[tuple[str, str]]


def report(session: Session | None, error: GpuError | None = None) -> Report:
    """What there is to say; `error` is why no runtime opened."""
    settings = (lambda: session.settings) if session is not None else Settings.load
    chapters = [_chapter("versions", _versions), _chapter("drivers", _drivers)]
    if error is not None:
        chapters.append(
            Chapter(
                "the runtime does not open",
                tuple(("", line.strip()) for line in str(error).splitlines()),
            )
        )
    if session is not None:
        chapters += [
            _chapter("devices", lambda: _devices(session)),
            _chapter("measured by", lambda: _helper(session)),
            _chapter("ledger", lambda: _ledger(session)),
            _chapter("last refusals, failures and drains", lambda: _refusals(session)),
        ]
    chapters += [
        _chapter("settings", lambda: _settings(settings())),
        _chapter("machine", lambda: _machine(settings())),
    ]
    return Report(tuple(_without_secrets(chapter) for chapter in chapters))


def _chapter(title: str, gather: Callable[[], Rows]) -> Chapter:
    try:
        return Chapter(title, tuple(gather()))
    except Exception as error:  # whatever is broken must not hide the rest
        return Chapter(title, (("cannot be told", f"{type(error).__name__}: {first_line(error)}"),))


def _without_secrets(chapter: Chapter) -> Chapter:
    return Chapter(
        chapter.title, tuple((what, _TOKEN.sub("***", masked(how))) for what, how in chapter.rows)
    )


_TOKEN = re.compile(r"\b(?:hf|sk|ghp|github_pat|glpat)[_-][A-Za-z0-9_-]{16,}")


def _versions() -> Rows:
    rows: Rows = [
        (
            "python",
            f"{platform.python_version()} on {platform.system()} {platform.release()} {platform.machine()}",
        )
    ]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:  # it is not imported for this: that takes seconds, and memory on the card
        rows.append(
            (
                "torch was built for",
                f"CUDA {torch.version.cuda}"
                if torch.version.cuda
                else f"ROCm {torch.version.hip}"
                if getattr(torch.version, "hip", None)
                else "the CPU",
            )
        )
    return rows


def _drivers() -> Rows:
    """Whom each kind of card was asked of, and what each said."""
    rows: Rows = []
    for name in drivers.SOURCES:
        source = drivers.source(name)
        try:
            rows.append(
                (
                    f"{source.KIND} by {source.NAME}",
                    drivers.with_time_limit(source.NAME, lambda source=source: _said(source)),
                )
            )
        except ProbeFailed as error:
            rows.append((f"{source.KIND} by {source.NAME}", str(error).splitlines()[0]))
    return rows + [
        (name, os.environ[name] or "(empty)") for name in VARIABLES if name in os.environ
    ]


def _said(source: Any) -> str:
    try:
        listing = source.list_cards()
        if listing.absent:
            return listing.absent
        known = ", ".join(f"{what} {version}" for what, version in source.versions().items())
    except drivers.NoAnswer as error:
        return f"fails: {error}"
    lost = "".join(f"; card {number}: {why}" for number, why in listing.failed.items())
    return f"{len(listing.cards)} devices, {known}{lost}"


def _devices(session: Session) -> Rows:
    book, world = session.look()
    out = drained(book, world)
    rows: Rows = []
    for view in views(book, world):
        device, sample = view.device, view.sample
        words = [
            device.name,
            f"total {show_bytes(device.total_bytes)}",
            f"budget {show_bytes(view.limit_bytes)}",
            f"claimed {show_bytes(view.claimed_bytes)}",
            "free not known"
            if not device.simulated and (sample is None or sample.free_bytes is None)
            else f"free {show_bytes(sample.free_bytes)}"
            if sample
            else "",
            str(view.level),
        ]
        if sample is not None:
            words += [
                f"{sample.utilisation_percent:.0f} % busy"
                if sample.utilisation_percent is not None
                else "",
                f"{sample.temperature_celsius:.0f} °C"
                if sample.temperature_celsius is not None
                else "",
                f"{sample.power_watts:.0f} W" if sample.power_watts is not None else "",
            ]
        if not device.is_host and not device.simulated:
            words += [
                device.uuid,
                f"{session.probe.place(device.id).torch} in torch here"
                if device in session.probe.devices
                else "not seen by this process",
            ]
        words += ["shares the machine's memory" if device.unified else "", out.get(device.id, "")]
        rows.append((device.id, ", ".join(word for word in words if word)))
    if trouble := status.snapshot(session).degraded:
        rows.append(("trouble", trouble))
    return rows


def _helper(session: Session) -> Rows:
    if session.probe.simulated:
        return [("", "nobody: the devices are simulated")]
    return list(session.probe.helper().items()) or [
        ("", "this process itself: the ledger is in memory")
    ]


def _ledger(session: Session) -> Rows:
    ledger, book = session.ledger, session.ledger.read()
    rows: Rows = [("where", ledger.url)]
    directory = getattr(ledger, "directory", None)
    if directory is not None:
        group = access_to(directory).group
        rows += [
            ("file system", files.file_system_of(directory)),
            (
                "shared by",
                f"group {group}" if group is not None else "nobody: it is private to this user",
            ),
        ]
    dead = ledger.dead(book)
    rows += [
        ("owners", f"{len(book.sections)}" + (f", {len(dead)} of them dead" if dead else "")),
        ("leases and tickets", f"{book.entries} ({len(book.tickets)} tickets)"),
        ("events so far", str(book.seq)),
        ("ghosts", str(len(book.ghosts))),
    ]
    for id, section in book.sections.items():
        owner = section.owner
        me = " (this process)" if id == session.me else ""
        rows.append(
            (
                owner.label,
                f"{len(section.leases)} leases, user {owner.user}{me}{', dead' if id in dead else ''}",
            )
        )
    return rows


def _refusals(session: Session) -> Rows:
    events = [event for event in session.history() if event.action in TELLING][-REFUSALS:]
    return [
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.wall)),
            f"{event.model} {event.action} ({event.reason}): {event.because}",
        )
        for event in events
    ] or [("", "none")]


def _settings(settings: Settings) -> Rows:
    return [
        (row.name, row.value if row.source == "default" else f"{row.value}  ({row.source})")
        for row in settings.sources()
    ]


def _machine(settings: Settings) -> Rows:
    file = settings.gpu_config_file
    if not os.path.exists(file):
        return [(file, "there is none")]
    known = host_config.read(file)
    user = name_of(os.geteuid())
    cap = known.cap(user, host_config.groups_of(user))
    limits = ", ".join(f"[{table}] {key}" for key, table in cap.tables.items()) if cap else "none"
    return [
        (file, f"ledger {known.ledger or 'not named'}"),
        (f"caps on {user}", limits),
        (
            f"{user} is",
            "an operator"
            if known.is_operator(user, host_config.groups_of(user))
            else "no operator",
        ),
    ]
