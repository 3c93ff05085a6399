"""Whose fault an error is: the caller's, the model's, or nobody's; and what the caller is told.

Pure. Only a model's own failures open its breaker. A model that could not answer may be stood in for by another,
whoever is to blame, unless it is the caller.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

from ... import errors
from ..queue.queue import LoadShared
from ..requests import Refused
from .breaker import Open

DECODE_FAILURES = 3  # in a row; then the model is loaded anew
_DECODE = re.compile(
    r"llama_(?:decode|encode)\W* *(?:returned|failed)|failed to decode", re.IGNORECASE
)
_NOBODYS = (
    errors.Busy,
    errors.Deadlock,
    errors.LedgerUnavailable,
    errors.NotLoaded,
    errors.CatalogUnavailable,
    errors.BadDocument,
    LoadShared,
    Open,
)


class Blame(enum.Enum):
    CALLER = "caller"
    MODEL = "model"
    NOBODY = "nobody"


def blame(error: BaseException, model: str) -> tuple[Blame, Refused | None]:
    """Whose fault it is, and the refusal to answer with, where that is settled by the error alone."""
    if isinstance(error, Refused):
        return (Blame.CALLER if error.status < 500 else Blame.NOBODY), error
    if isinstance(error, errors.BadCall):
        return Blame.CALLER, Refused(
            400, "engine_refused", f"{model} refused: {getattr(error, 'why', error)}"
        )
    if isinstance(error, errors.UnknownModel):
        return Blame.NOBODY, Refused(404, "model_not_found", str(error), param="model")
    if isinstance(error, errors.ModelDisabled):
        return Blame.NOBODY, Refused(403, "model_disabled", str(error), param="model")
    if isinstance(error, errors.NotAllowed):
        return Blame.NOBODY, Refused(403, "not_allowed", str(error))
    return (Blame.NOBODY if isinstance(error, _NOBODYS) else Blame.MODEL), None


def is_decode_failure(error: BaseException) -> bool:
    """Whether llama.cpp could not compute a batch: it may pass, or be for good.

    >>> is_decode_failure(RuntimeError("llama_decode returned -3")), is_decode_failure(RuntimeError("no such file"))
    (True, False)
    """
    return _DECODE.search(str(error)) is not None


def could_not(asked: str, failed: Sequence[tuple[str, BaseException]]) -> Refused:
    """That nobody could answer, and why each could not."""
    told = [f"{model}: {first_line(error)}" for model, error in failed]
    waits = [error.retry_after for _, error in failed if isinstance(error, Open)]
    code = "breaker_open" if len(waits) == len(failed) else "no_answer"
    return Refused(
        503,
        code,
        f"{asked} could not be answered. " + " · ".join(told),
        min(waits, default=None),
        failures=told,
    )


def first_line(error: BaseException) -> str:
    """An error's sentence, without the advice that follows it."""
    text = str(error).strip().splitlines()
    return text[0][:500] if text else type(error).__name__
