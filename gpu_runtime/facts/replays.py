"""Recorded decisions on requests, and the results of making the same decisions again."""

from __future__ import annotations

from ..safe_text import lines
from .base import Value
from .book import Book
from .decisions import Grant, Refuse, Request, Verdict, Wait, World


class Decided(Value):
    """One decision on a request, with everything that the scheduler read for this decision."""

    id: int  # its number in the journal; 0 before it is written
    wall: float  # epoch seconds
    version: str  # of gpu-console
    policy: str
    book: Book
    request: Request
    world: World
    verdict: Verdict

    @property
    def model(self) -> str:
        """The name of the model that was requested."""
        return self.request.lease.name


class Replayed(Value):
    """A recorded decision, and whether the scheduler now reaches the same verdict."""

    id: int
    wall: float  # epoch seconds of the recorded decision
    model: str
    decided: str  # the recorded verdict in a sentence
    now: str  # the verdict of the replay in a sentence
    same: bool
    differs: tuple[str, ...] = ()  # the parts of the verdict that differ, each in a sentence
    version: str = ""  # of gpu-console when the decision was recorded, if that was another one

    def __str__(self) -> str:
        return lines(f"Decision {self.id} on {self.model}: {self.decided} {self.result}")

    @property
    def result(self) -> str:
        """The result of the replay, in sentences."""
        by = f" It was recorded by version {self.version}." if self.version else ""
        if self.same:
            return f"Decided again: the same.{by}"
        return f"Decided again: {self.now} {' '.join(self.differs)}{by}"


def verdict_kind(verdict: Verdict) -> str:
    """The kind of `verdict` as people say it: granted, waiting or refused."""
    kinds: dict[type, str] = {Grant: "granted", Wait: "waiting", Refuse: "refused"}
    return kinds[type(verdict)]
