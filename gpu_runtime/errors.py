"""Every error, with its facts as attributes and a sentence made from them.

Each class says in its docstring what it means, and docs/reference/errors.md lists them by what happened.
A notebook shows the sentence of an error and the user's lines that failed. `%tb` shows all frames.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shlex
from typing import Any

from .safe_text import MOST_MESSAGE, MOST_QUOTED, listed, nearest, printable, quoted
from .user_frames import came_through_user_code, rendered, user_lines

__all__ = [  # what the package exports
    "AlreadyRegistered", "AmbiguousName", "BadCall", "BadDocument", "BadSetting", "BadSize", "Busy",
    "CannotGovern", "CatalogUnavailable", "Deadlock", "DoesNotFit", "EngineDied", "EngineFault",
    "FleetUnavailable", "GpuError", "LedgerNewer", "LedgerUnavailable", "LoadFailed",
    "MemoryLimitExceeded", "ModelDisabled", "NeedsWith", "NodeLost", "NotAllowed", "NotAModel",
    "NotLoaded", "NotResident", "OutOfMemory", "ProbeFailed", "ProcessLost", "StillInUse",
    "UnknownDevice", "UnknownModel", "UnknownSize", "WaitEnded",
]  # fmt: skip

_SIZES = "'8 GiB', '10GB' or bytes as a number"
MOST_PROBLEM = 600  # characters of one problem of a file
MOST_PROBLEMS = 9  # further errors of one file that are listed after the first


class GpuError(Exception):
    """A failure, explained in a sentence for the user. Its `facts` are also attributes."""

    places: tuple[str, ...] = ()  # the user's lines, noted here if the traceback is dropped

    def __init__(self, message: str, **facts: Any) -> None:
        """`message` is the sentence. Each of the `facts` becomes an attribute.

        The sentence is shortened and unprintable characters are escaped, because it may contain
        any name, path or message of another library.
        """
        super().__init__(printable(message, MOST_MESSAGE, keep="\n"))
        self.facts = facts
        self.__dict__.update(facts)

    message = property(str, doc="The sentence.")

    def __init_subclass__(cls) -> None:
        """Lets `cls(message=…)` make an error of each class, whatever its own constructor takes.

        If a DataLoader's worker raises an error with a `message`, torch makes it again in this way.
        """
        if (own := vars(cls).get("__init__")) is not None:

            @functools.wraps(own)
            def constructor(self: GpuError, *arguments: Any, **named: Any) -> None:
                alone = not arguments and named.keys() == {"message"}
                (GpuError.__init__ if alone else own)(self, *arguments, **named)

            cls.__init__ = constructor  # type: ignore[method-assign]

    def _render_traceback_(self) -> list[str]:
        """The lines for IPython: the message, the user's lines that failed, and a help command."""
        name = type(self).__name__
        page = name if type(self).__module__ == __name__ else GpuError.__name__
        places = [*user_lines(self), *self.places]
        report = [f"{name}: {self}", "", *places, f"More:  %gpu help {page}"]
        return rendered(self, report)

    def __reduce__(self) -> Any:
        return rebuilt, (type(self), str(self), self.facts)


def rebuilt(kind: type[GpuError], message: str, facts: dict[str, Any]) -> GpuError:
    """An error of this `kind` with this `message` and these `facts`."""
    error = BaseException.__new__(kind)  # MemoryError.__new__ accepts no subclass of two errors
    GpuError.__init__(error, message, **facts)
    return error


def first_line(error: BaseException) -> str:
    """The first line of the text of `error`, shortened; the class name of an error without text."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


# -- no room ---------------------------------------------------------------------------------------


class DoesNotFit(GpuError):
    """The request cannot fit on the devices as they are.

    Attributes: name, need_bytes, budget_bytes, device, holders, considered.
    """


class MemoryLimitExceeded(DoesNotFit):
    """The request would exceed INFERENCE_MEMORY_LIMIT_GB.

    Attributes: name, need_bytes, budget_bytes, current_bytes.
    """


class StillInUse(GpuError):
    """The model is in use, so it is not moved. Attributes: name, lease, owner, since_seconds."""


class NotAllowed(GpuError):
    """A cap forbids the action, or the model is another user's. Attributes: name, user, because."""


class Busy(GpuError):
    """No room was freed in time. Attributes: name, waited_seconds, because."""


class WaitEnded(GpuError):
    """A person (`by`) ended the wait for room. Attributes: name, by, waited_seconds, because."""


class Deadlock(GpuError):
    """Several threads each hold memory that another one waits for. Attributes: name, because."""


class OutOfMemory(GpuError, MemoryError):
    """Memory ran out in a load, or in a block of `rt.use` or `rt.lease` (`%%gpu`). Else torch's own error is raised.

    Attributes: device, asked_bytes (0 if not known), holders, report. `left` are the leases of this process's idle
    models that were evicted when the `with` block ended.
    """

    left: Any = ()


# -- names and values ------------------------------------------------------------------------------


class UnknownModel(GpuError, LookupError):
    """No model has this name. Attributes: name, known."""

    def __init__(
        self,
        name: str,
        known: tuple[str, ...] = (),
        *,
        none: str = "No model is registered yet.",
        advice: str = "",
    ) -> None:
        """`known` are the existing names. Without names, the message has the sentence `none`.

        `advice` is the last line, with a command to type: by default, one that registers `name`.
        """
        short = printable(name, MOST_QUOTED)
        usual = f"Register it:  %gpu load {shlex.quote(short)} PATH      or  rt.register({quoted(name)}, PATH)"
        if name.endswith(".ipynb"):
            usual = f"For a notebook type evict, park, restore or why. Its models:  NAME@{short}"
        elif "@" in name:
            usual = "NAME@PID is a model of another process. All of them:  %gpu leases"
        existing = f"Known: {listed(known)}." if known else none
        super().__init__(
            f"no model is called {quoted(name)}. {nearest(name, known)}{existing}\n  {advice or usual}",
            name=name,
            known=known,
        )


class UnknownDevice(GpuError, LookupError):
    """No device has this name. Attributes: device, known."""

    def __init__(self, device: str, known: tuple[str, ...] = ()) -> None:
        """`device` is the name that was given. `known` are the names of the machine's devices."""
        existing = ", ".join(known) or "none"
        super().__init__(
            f"no device is called {quoted(device)}. This machine has {existing}.",
            device=device,
            known=known,
        )


class UnknownVerb(GpuError, LookupError):
    """No verb has this name. Attributes: verb, nearest."""


class NeedsWith(GpuError, AttributeError, TypeError):
    """The result of `rt.use(…)` or `rt.lease(…)` was used without `with`. Attributes: attribute."""

    def __init__(self, call: str, value: str, attribute: str = "") -> None:
        """`call` is the user's call, such as `rt.use("qwen")`, and `value` a name for its result.

        `attribute` is the attribute that was read from the result; empty if the result was called.
        """
        use = f"{value}.{printable(attribute, MOST_QUOTED)}" if attribute else f"{value}(…)"
        super().__init__(
            f"{call} holds nothing yet: `with` is missing.\n"
            f"  Write:  with {call} as {value}: {use}",
            attribute=attribute,
        )


class AmbiguousName(GpuError, LookupError):
    """Several owners have a model of this name. Attributes: name, choices."""

    def __init__(self, name: str, choices: tuple[str, ...]) -> None:
        """`choices` are the full names to choose from, such as `qwen@4121` for the `name` qwen."""
        super().__init__(
            f"several processes have {quoted(name)}: {', '.join(choices)}. Name one, as in {choices[0]}.",
            name=name,
            choices=choices,
        )


class AlreadyRegistered(GpuError, ValueError):
    """Two different models would have one name. Attributes: name."""

    def __init__(self, name: str, message: str = "") -> None:
        """`message` replaces the usual sentence about a second registration of `name`."""
        usual = (
            f"{quoted(name)} is registered already, from another source or with other options.\n"
            f"  Forget the old one first:  rt.forget({quoted(name)})      or choose another name."
        )
        super().__init__(message or usual, name=name)


class BadSize(GpuError, ValueError):
    """A value that is not a size or a duration. Attributes: value."""

    def __init__(
        self, value: Any, what: str = "size", example: str = _SIZES, meant: str = ""
    ) -> None:
        """`what` is the expected kind of `value`, `example` a valid one, `meant` the likely one."""
        suggestion = f"Did you mean {meant}? " if meant else ""
        super().__init__(
            f"{quoted(value)} is not a {what}. {suggestion}Write it like {example}.",
            value=value,
            what=what,
        )


class UnknownSize(BadSize):
    """Nothing shows how large a model is, so its size must be declared. Attributes: name, why."""

    def __init__(self, name: str, why: str) -> None:
        """`why` is the reason, as the second half of a sentence about the model `name`."""
        GpuError.__init__(
            self,
            f"the size of {printable(name, MOST_QUOTED)} is unknown: {why}.\n"
            f"  Declare it:  rt.register({quoted(name)}, …, size='8 GiB'), "
            "or  memory: 8GiB  in the catalogue\n"
            f"  Or plan for a size:  %gpu plan 8GiB",
            name=name,
            why=why,
        )


class BadSetting(GpuError, ValueError):
    """A setting whose value cannot be used. Attributes: setting, value, expected."""

    def __init__(self, setting: str, value: Any, expected: str) -> None:
        """`setting` must be `expected`, but its value was `value`."""
        super().__init__(
            f"{printable(setting, MOST_QUOTED)}={quoted(value)} cannot be used: it must be {expected}.",
            setting=setting,
            value=value,
            expected=expected,
        )


class BadDocument(GpuError, ValueError):
    """A file of models, tasks or keys has an error.

    Attributes: file, line, field, problem, and `others`, the further errors in the file.
    """

    def __init__(
        self, file: str, line: int, field: str, problem: str, others: tuple[BadDocument, ...] = ()
    ) -> None:
        """`problem` describes the mistake in `file`. `others` are the further errors in the file.

        `line` is 0 if the line is unknown. `field` is empty if the mistake is in no single field.
        """
        place = printable(file, MOST_PROBLEM)
        if line:
            place += f", line {line}"
        if field:
            place += f", {printable(field, MOST_QUOTED)}"
        lines = [f"{place}: {printable(problem, MOST_PROBLEM)}."]
        lines += [f"  {other}" for other in others[:MOST_PROBLEMS]]
        if len(others) > MOST_PROBLEMS:
            lines.append(f"  and {len(others) - MOST_PROBLEMS} more")
        super().__init__(
            "\n".join(lines), file=file, line=line, field=field, problem=problem, others=others
        )

    @classmethod
    def of(cls, found: list[BadDocument]) -> BadDocument:
        """Returns the first error of `found`, with the other errors of the file as its `others`."""
        first, *others = found
        if not others:
            return first
        return cls(first.file, first.line, first.field, first.problem, tuple(others))


# -- catalogue and loading -------------------------------------------------------------------------


class CatalogUnavailable(GpuError):
    """The model catalogue cannot be read or written. Attributes: path, why."""


class ModelDisabled(GpuError):
    """The model's entry in the catalogue has `enabled: false`. Attributes: name."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the model."""
        super().__init__(
            f"{name} is disabled in the catalogue (enabled: false), so it is not loaded.\n"
            f"  Enable it:  gpu inspect {shlex.quote(name)} > FILE, write enabled: true, gpu apply -f FILE",
            name=name,
        )


class LoadFailed(GpuError):
    """A source could not be loaded. Attributes: name, source, mistake.

    `mistake` is True if the source, an option or a missing library is the reason, not an engine.
    """

    mistake: bool = False


class NotAModel(LoadFailed):
    """The source is not a model that can be loaded. Attributes: name, source."""

    mistake = True


class NotLoaded(GpuError):
    """The model is in the catalogue, but no process has loaded it. Attributes: name."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the model."""
        super().__init__(
            f"{name} is in the catalogue, but no process has loaded it; a command cannot hold a model.\n"
            f"  In a notebook:  %gpu load {shlex.quote(name)}",
            name=name,
        )


class NotResident(GpuError):
    """A model was called while away, with `restore_on_call=False`. Attributes: name, where."""


# -- engines, drivers and modules ------------------------------------------------------------------


class BadCall(GpuError, ValueError):
    """An engine rejected a call: it was too long, of a wrong type, or unknown. Attributes: name, method, why."""


class EngineDied(GpuError):
    """An engine's process ended; its lease was freed. Attributes: name, pid, status, kind, why, log."""


class EngineFault(GpuError):
    """An engine was unloaded, because its driver failed or because it failed repeatedly.

    Attributes: name, kind, why, log, reloads.
    """


class ProcessLost(GpuError):
    """The driver no longer serves this process. Attributes: name, kind, why."""


class CannotGovern(GpuError, TypeError):
    """A module that cannot be moved safely. Attributes: name, why."""


class ProbeFailed(GpuError):
    """A device did not respond. Attributes: device."""


# -- the fleet -------------------------------------------------------------------------------------


class FleetUnavailable(GpuError):
    """A process cannot connect to a fleet, or a host cannot join it. Attributes: why."""


class NodeLost(GpuError):
    """A host of the fleet died, or restarted, while its model was used. Attributes: name, host, why."""

    def __init__(self, name: str, host: str, why: str) -> None:
        """The model `name` was lost on `host`, and `why`."""
        what, advice = f"{host} was lost", "See which hosts answer:  gpu fleet"
        if name:
            what = f"{name} was lost on {host}"
            advice = "Use it again: another host serves it, or pass retry=True to fleet.use"
        super().__init__(
            f"{what}: {why}.\n  {advice}",
            name=name,
            host=host,
            why=why,
        )


# -- the ledger ------------------------------------------------------------------------------------


class LedgerUnavailable(GpuError):
    """The book (all leases and requests) cannot be read or written. Attributes: path."""


class LedgerNewer(LedgerUnavailable):
    """A newer version wrote this book. Attributes: path, found, ours."""

    def __init__(self, path: str, found: int, ours: int) -> None:
        """The ledger at `path` has the schema number `found`. This version reads up to `ours`."""
        super().__init__(
            f"the ledger {path} has schema {found}; this gpu-console reads up to {ours}.\n"
            f"  Upgrade this environment, or use another ledger:  GPU_LEDGER=keeper:///PATH",
            path=path,
            found=found,
            ours=ours,
        )


class LedgerRefused(LedgerUnavailable):
    """A write was refused because it would break a law of the book. The book is unchanged.

    The laws are in docs/architecture.md. Attributes: path, why.
    """


# -- errors of the system and of other packages ------------------------------------------------------

_HERE = os.path.join(os.path.dirname(__file__), "version.py")
_OURS = ("gpu_runtime", "gpu", "gpu_panels")
_PROJECTS = {
    "yaml": "pyyaml",
    "pynvml": "nvidia-ml-py",
}  # modules with other names than their packages
_LIMITS = {  # what the system refused -> what happened, and what to type
    errno.EMFILE: ("this process may open no more files", "Allow more:  ulimit -n 4096"),
    errno.ENFILE: ("this machine may open no more files", "Allow more:  sysctl fs.file-max"),
    errno.EFBIG: (
        "this process may write no larger files",
        "Allow larger ones:  ulimit -f unlimited",
    ),
    errno.ENOSPC: ("the disk is full", "Make room:  df -h"),
    errno.EDQUOT: ("the disk quota of this user is used up", "Make room:  quota"),
    errno.EROFS: ("the disk is read-only", "See:  mount"),
}


def _stamp() -> tuple[int, int] | None:
    """Identifies the installed files of this package. None if they are gone."""
    try:
        stat = os.stat(_HERE)
    except OSError:  # the package was removed
        return None
    return stat.st_ino, stat.st_mtime_ns


_LOADED = _stamp()


def in_one_sentence(error: BaseException) -> GpuError | None:
    """What to type about an `error` of the system or of a package, as an error of ours.

    The result is None for an error of ours, for an error of the user's code, and for an error that
    this function does not know.
    """
    if isinstance(error, GpuError) or came_through_user_code(error):
        return None
    found: GpuError | None = None
    if isinstance(error, ImportError):
        found = _of_import(error)
    elif str(getattr(error, "filename", "")).startswith("/proc/") and not os.path.exists(
        "/proc/self"
    ):
        found = GpuError(
            f"this process sees no /proc ({error}), where the system shows the memory of the machine "
            "and which processes live. Nothing was changed.\n"
            "  Mount it:  mount -t proc proc /proc"
        )
    elif isinstance(error, (AttributeError, FileNotFoundError)) and _stamp() != _LOADED:
        found = _upgraded(error)
    elif isinstance(error, OSError) and error.errno in _LIMITS:
        what, advice = _LIMITS[error.errno]
        found = GpuError(f"{what} ({error}). Nothing was changed.\n  {advice}")
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        found = GpuError(
            f"this process may start no more threads ({error}). Nothing was changed.\n"
            "  Allow more:  ulimit -u 4096"
        )
    return found


def reword(error: BaseException) -> None:
    """Raises what `in_one_sentence` returns for `error`, with `error` as its cause.

    If it returns nothing, this function does nothing, and the caller raises `error` itself.
    """
    told = in_one_sentence(error)
    try:
        if told is not None:
            raise told from error
    finally:
        del told  # the error would keep this frame, and the frame the error


def _of_import(error: ImportError) -> GpuError | None:
    package = (error.name or "").partition(".")[0]
    if package in _OURS:
        return _upgraded(error)
    project = _PROJECTS.get(package, package)
    need = _requirement(project)
    if not need:
        return None
    return GpuError(
        f"gpu-console needs {need}, and this environment has {_version(project)}: {error}.\n"
        f"  Install it:  pip install '{need}'"
    )


def _upgraded(error: BaseException) -> GpuError:
    what = "removed" if _stamp() is None else "upgraded"
    return GpuError(
        f"gpu-console was {what} while this process runs ({printable(str(error), MOST_QUOTED)}).\n"
        "  Save what you need, and restart the kernel. Until then its variables stay."
    )


def _requirement(package: str, of: str = "gpu-console") -> str:
    """The requirement of gpu-console or of its libraries on `package`, such as `pandas>=2.1`; empty if none."""
    from importlib import metadata

    try:
        lines = metadata.requires(of) or ()
    except metadata.PackageNotFoundError:
        # In a kernel of `gpu box install` the package is not on `sys.path`.
        beside = metadata.distributions(name=of, path=[os.path.dirname(os.path.dirname(__file__))])
        lines = next((distribution.requires for distribution in beside), None) or ()
    needed = {re.split(r"[^\w.-]", line)[0]: line.partition(";")[0].strip() for line in lines}
    for name, line in needed.items():
        if name.lower().replace("-", "_") == package.lower():
            return line
    if of != "gpu-console":
        return ""
    return next(filter(None, (_requirement(package, name) for name in needed)), "")


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:  # the sentence says so
        return "none"
