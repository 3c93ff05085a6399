"""What can go wrong, each with its facts as attributes and a sentence made from them.

    GpuError
    ├── DoesNotFit                 it can never fit as things stand; nothing was evicted
    │   └── MemoryLimitExceeded    … because INFERENCE_MEMORY_LIMIT_GB forbids it
    ├── StillInUse                 what you want moved is being used
    ├── NotAllowed                 the operator's caps forbid it, or it is another user's to say
    ├── Busy                       the wait for room timed out
    ├── Deadlock                   waiting would never end
    ├── OutOfMemory                the device ran out while a model was in use
    ├── UnknownModel, UnknownDevice, UnknownVerb, AmbiguousName, AlreadyRegistered
    ├── BadSize, BadSetting        also ValueError
    │   └── UnknownSize            … because nothing tells how large the model is
    ├── BadDocument                a file of models says what cannot be; also ValueError
    ├── CatalogUnavailable         the model catalogue cannot be read or written
    ├── ModelDisabled              its entry in the catalogue says `enabled: false`
    ├── LoadFailed                 the source could not be loaded
    │   └── NotAModel              … because it is no model
    ├── BadCall                    an engine refused what it was asked; also ValueError
    ├── EngineDied                 an engine's process ended; the next use loads it anew
    ├── EngineFault                an engine failed and was put away; the next use loads it anew
    ├── ProcessLost                the driver no longer serves this process; only a new one helps
    ├── CannotGovern               a module that cannot be moved safely, refused by name
    ├── NotLoaded                  in the catalogue, and loaded by no process that could be asked
    ├── NotResident                called while away, where it may not come back by itself
    ├── ProbeFailed                a device would not answer
    └── LedgerUnavailable          the book cannot be read or written
        ├── LedgerNewer            … because a newer version wrote it
        └── LedgerRefused          … because the write would break a law

In a notebook each shows as its own sentence, never as a traceback of ours.
"""

from __future__ import annotations

from typing import Any

MOST_NAMES = 12  # in one sentence


class GpuError(Exception):
    """A failure that is told in one helpful sentence. `facts` holds what the sentence was made from."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts
        self.__dict__.update(facts)

    def _render_traceback_(self) -> list[str]:
        """IPython shows this instead of a traceback; nbval still sees the cell fail."""
        return [f"{type(self).__name__}: {self}"]

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), str(self), self.facts)


def _rebuild(kind: type[GpuError], message: str, facts: dict[str, Any]) -> GpuError:
    error = kind.__new__(kind)
    GpuError.__init__(error, message, **facts)
    return error


class DoesNotFit(GpuError):
    """It can never fit as things stand. Attributes: name, need_bytes, budget_bytes, device, holders, considered."""


class MemoryLimitExceeded(DoesNotFit):
    """INFERENCE_MEMORY_LIMIT_GB would be passed. Attributes: name, need_bytes, budget_bytes, current_bytes."""


class StillInUse(GpuError):
    """A model in use is never moved. Attributes: name, lease, owner, since_seconds."""


class NotAllowed(GpuError):
    """The operator's caps forbid it, or it is another user's to say. Attributes: name, user, because."""


class Busy(GpuError):
    """No room came free in time. Attributes: name, waited_seconds, because."""


class Deadlock(GpuError):
    """Threads hold what each other waits for. Attributes: name, because."""


class OutOfMemory(GpuError, MemoryError):
    """A device ran out of memory while a model was in use. Attributes: device, asked_bytes, holders, report."""


class UnknownModel(GpuError, LookupError):
    """No model of that name. Attributes: name, known."""

    def __init__(
        self,
        name: str,
        known: tuple[str, ...] = (),
        *,
        none: str = "No model is registered yet.",
        advice: str = "",
    ) -> None:
        import difflib

        close = difflib.get_close_matches(name, known, n=1)
        listed = ", ".join(sorted(known)[:MOST_NAMES]) + (
            f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
        )
        hint = f"Did you mean {close[0]}? " if close else ""
        advice = (
            advice or f"Register it:  %gpu load {name} PATH      or  rt.register({name!r}, PATH)"
        )
        super().__init__(
            f"no model is called {name!r}. {hint}{f'Known: {listed}.' if known else none}\n  {advice}",
            name=name,
            known=known,
        )


class UnknownDevice(GpuError, LookupError):
    """No device of that name. Attributes: device, known."""

    def __init__(self, device: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(
            f"no device is called {device!r}. This machine has {', '.join(known) or 'none'}.",
            device=device,
            known=known,
        )


class UnknownVerb(GpuError, LookupError):
    """No verb of that name. Attributes: verb, nearest."""


class AmbiguousName(GpuError, LookupError):
    """Several owners have a model of that name. Attributes: name, choices."""

    def __init__(self, name: str, choices: tuple[str, ...]) -> None:
        super().__init__(
            f"{name!r} is held by several: {', '.join(choices)}. Say which, as in {choices[0]}.",
            name=name,
            choices=choices,
        )


class AlreadyRegistered(GpuError, ValueError):
    """Two registrations under one name. Attributes: name."""

    def __init__(self, name: str, told: str = "") -> None:
        super().__init__(
            told
            or (
                f"{name!r} is registered already, from another source or with other options.\n"
                f"  Forget the old one first:  rt.forget({name!r})      or choose another name."
            ),
            name=name,
        )


class BadSize(GpuError, ValueError):
    """Not a size (or a duration). Attributes: value."""

    def __init__(
        self, value: Any, what: str = "size", example: str = "'8 GiB', '10GB' or bytes as a number"
    ) -> None:
        super().__init__(
            f"{value!r} is not a {what}. Write it like {example}.", value=value, what=what
        )


class UnknownSize(BadSize):
    """Nothing tells how large a model is; somebody has to say it. Attributes: name, why."""

    def __init__(self, name: str, why: str) -> None:
        GpuError.__init__(
            self,
            f"the size of {name} is unknown: {why}.\n"
            f"  Say it:  rt.register({name!r}, …, size='8 GiB'), or  memory: 8GiB  in the catalogue\n"
            f"  Or plan for a size:  %gpu plan 8GiB",
            name=name,
            why=why,
        )


class BadSetting(GpuError, ValueError):
    """A setting whose value cannot be used. Attributes: setting, value, expected."""

    def __init__(self, setting: str, value: Any, expected: str) -> None:
        super().__init__(
            f"{setting}={value!r} cannot be used: it must be {expected}.",
            setting=setting,
            value=value,
            expected=expected,
        )


class BadDocument(GpuError, ValueError):
    """A file of models that says what cannot be. Attributes: file, line, field, problem; others: all further ones."""

    def __init__(
        self, file: str, line: int, field: str, problem: str, others: tuple[BadDocument, ...] = ()
    ) -> None:
        place = file + (f", line {line}" if line else "") + (f", {field}" if field else "")
        more = "".join(f"\n  {other}" for other in others[:9])
        more += f"\n  and {len(others) - 9} more" if len(others) > 9 else ""
        super().__init__(
            f"{place}: {problem}.{more}",
            file=file,
            line=line,
            field=field,
            problem=problem,
            others=others,
        )

    @classmethod
    def of(cls, found: list[BadDocument]) -> BadDocument:
        """All that is wrong with a file, as one error: the first, then the others."""
        first, *others = found
        return (
            cls(first.file, first.line, first.field, first.problem, tuple(others))
            if others
            else first
        )


class CatalogUnavailable(GpuError):
    """The model catalogue cannot be read or written. Attributes: path, why."""


class ModelDisabled(GpuError):
    """Its entry in the catalogue says `enabled: false`. Attributes: name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is disabled in the catalogue (enabled: false), so it is not loaded.\n"
            f"  Enable it:  gpu inspect {name} > FILE, write enabled: true, gpu apply -f FILE",
            name=name,
        )


class LoadFailed(GpuError):
    """A source could not be loaded. Attributes: name, source."""


class NotAModel(LoadFailed):
    """The path is no model that we know how to load. Attributes: name, source."""


class BadCall(GpuError, ValueError):
    """An engine refused what it was asked: too long, of a wrong type, unknown to it. Attributes: name, method, why."""


class EngineDied(GpuError):
    """An engine's process ended; its lease came free. Attributes: name, pid, status, kind, why, log."""


class EngineFault(GpuError):
    """An engine failed by its driver, or again and again, and was put away. Attributes: name, kind, why, log,
    reloads."""


class ProcessLost(GpuError):
    """The driver no longer serves this process. Attributes: name, kind, why."""


class CannotGovern(GpuError, TypeError):
    """A module that cannot be moved safely. Attributes: name, why."""


class NotLoaded(GpuError):
    """It is in the catalogue, and no process has loaded it that could be asked. Attributes: name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is in the catalogue, and no process has loaded it; a command cannot hold a model.\n"
            f"  In a notebook:  %gpu load {name}",
            name=name,
        )


class NotResident(GpuError):
    """Called while it is not on a device, and told not to come back by itself. Attributes: name, where."""


class ProbeFailed(GpuError):
    """A device would not answer. Attributes: device."""


class LedgerUnavailable(GpuError):
    """The book cannot be read or written; no grants until it can. Attributes: path."""


class LedgerNewer(LedgerUnavailable):
    """A newer version wrote this book. Attributes: path, found, ours."""

    def __init__(self, path: str, found: int, ours: int) -> None:
        super().__init__(
            f"the ledger {path} has schema {found}; this gpu-console reads up to {ours}.\n"
            f"  Upgrade this environment, or use another ledger:  GPU_LEDGER=sqlite:///PATH",
            path=path,
            found=found,
            ours=ours,
        )


class LedgerRefused(LedgerUnavailable):
    """A write that would break a law was refused; the book is as it was. Attributes: path, why."""
