"""Finds the cause of an error (the caller, the model or neither), and the refusal that the caller gets.

This module is pure. Only faults of an engine open a model's circuit breaker. Mistakes of callers, mistakes in the
catalogue and a lack of memory do not open it. Another model may answer instead, unless the caller caused the error.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from ... import errors
from ..queue.queue import LoadShared
from ..requests import Refused
from .breaker import BreakerOpen, first_line

_NOT_OF_THE_MODEL = (
    errors.Busy,
    errors.WaitEnded,
    errors.Deadlock,
    errors.LedgerUnavailable,
    errors.NotLoaded,
    errors.CatalogUnavailable,
    errors.BadDocument,
    errors.BadSetting,
    errors.BadSize,
    errors.UnknownDevice,
    errors.CannotGovern,
    errors.DoesNotFit,
    errors.StillInUse,
    LoadShared,
    BreakerOpen,
)


# A call that every healthy model of its kind answers. It is made after a fault: if it is answered, the call before it
# was the cause. Images have none, because each takes long.
PLAIN_TEXT = "a"
PLAIN_CALLS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": PLAIN_TEXT}], "max_tokens": 1},
    "completions": {"prompt": PLAIN_TEXT, "max_tokens": 1},
    "embeddings": {"input": PLAIN_TEXT},
    "rerank": {"query": PLAIN_TEXT, "documents": [PLAIN_TEXT]},
    "tokenize": {"prompt": PLAIN_TEXT},
    "detokenize": {"tokens": [1]},
}
_ENGINE_GONE = (errors.EngineDied, errors.ProcessLost, errors.LoadFailed)


class Blame(enum.Enum):
    """The cause of an error."""

    CALLER = "caller"
    MODEL = "model"
    NOBODY = "nobody"


def blame(error: BaseException, model: str) -> tuple[Blame, Refused | None]:
    """The cause of an `error` of `model`, and the refusal with which the call is answered.

    The refusal is None if `no_answer` makes it later, from the errors of all models that were tried.
    """
    if isinstance(error, Refused):
        return (Blame.CALLER if error.status < 500 else Blame.NOBODY), error
    if isinstance(error, errors.BadCall):
        text = f"{model} refused: {getattr(error, 'why', error)}"
        return Blame.CALLER, Refused(400, "engine_refused", text)
    if isinstance(error, errors.UnknownModel):
        return Blame.NOBODY, Refused(404, "model_not_found", str(error), param="model")
    if isinstance(error, errors.ModelDisabled):
        return Blame.NOBODY, Refused(403, "model_disabled", str(error), param="model")
    if isinstance(error, errors.NotAllowed):
        return Blame.NOBODY, Refused(403, "not_allowed", str(error))
    if isinstance(error, _NOT_OF_THE_MODEL) or getattr(error, "mistake", False):
        return Blame.NOBODY, None
    if isinstance(error, ValueError):  # a library rejected an argument
        return Blame.CALLER, Refused(400, "engine_refused", f"{model} refused: {first_line(error)}")
    return Blame.MODEL, None


def may_be_of_the_call(error: BaseException, kind: str, model: str) -> bool:
    """Whether a plain call can show the cause of `error`: the engine of `model` runs, or has sent a status."""
    is_fault = blame(error, model)[0] is Blame.MODEL
    gone = isinstance(error, _ENGINE_GONE) or getattr(error, "reloads", False)
    is_silent = getattr(error, "status", 500) is None
    return is_fault and kind in PLAIN_CALLS and not gone and not is_silent


def fault_of_the_call(error: BaseException, model: str) -> Refused:
    """The refusal (400) of a call that `model` cannot answer, while it answers a plain call. `error` is its error."""
    why = "It answers other calls, so the cause is in this one"
    return Refused(400, "engine_refused", f"{model} refused: {first_line(error)}. {why}")


def no_answer(asked: str, failed: Sequence[tuple[str, BaseException]]) -> Refused:
    """The refusal of a call of `asked` after all `failed`: 507, which clients do not repeat, if none fits, else 503."""
    reasons = list(dict.fromkeys(f"{model}: {first_line(error)}" for model, error in failed))
    waits = [error.retry_after for _, error in failed if isinstance(error, BreakerOpen)]
    code = "breaker_open" if len(waits) == len(failed) else "no_answer"
    text = f"{asked} could not be answered. " + " · ".join(reasons)
    if failed and all(isinstance(error, errors.DoesNotFit) for _, error in failed):
        return Refused(507, "does_not_fit", text, failures=reasons)
    return Refused(503, code, text, min(waits, default=None), failures=reasons)
