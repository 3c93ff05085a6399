"""Replays a history for every combination of policy, card, host memory and engine.

Two policies are always replayed too, with the plain engine. `lru` is the reference. `clairvoyant`
knows when each model is used next, so it shows the most that a better policy could gain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ..errors import BadSetting, BadSize, GpuError
from ..facts import Lease, Policy, World
from ..scheduler.policies import POLICIES, policy
from ..units import parse_bytes
from .histories import UseHistory
from .replay import ENGINES, Result, replay

CLAIRVOYANT = "clairvoyant"
REFERENCE = ("lru", "plain")
DEVICES = "80GB,10%,20%,40%"
HOSTS = "0GB,20%,50%,100%"


class BacktestRow(NamedTuple):
    """The result of one replay. Sizes are in bytes, and `wait_*` is in seconds. `wait_vs_lru` is a ratio."""

    policy: str
    engine: str
    device_bytes: int
    host_bytes: int
    requests: int
    wait_s: float
    wait_p50_s: float
    wait_p99_s: float
    loads: int
    restores: int
    moved_bytes: int
    requests_per_s: float  # over the whole replay: what a shorter wait may cost
    wait_vs_lru: float  # against lru on the plain engine; 1.0 if neither waits


def compare(
    history: UseHistory,
    *,
    policies: Sequence[str] = ("lru", "cost_aware", "keep_score"),
    engines: Sequence[str] = ("full",),
    devices: Sequence[str] = tuple(DEVICES.split(",")),
    hosts: Sequence[str] = tuple(HOSTS.split(",")),
) -> Iterator[BacktestRow]:
    """Yields one row for each combination of the arguments, as soon as the replay for it has ended.

    `devices` and `hosts` are sizes such as `80GB`, or percents of the bytes of all models together.
    A card that is given in percent has at least the bytes of the largest model.

    Raises BadSetting for an unknown policy or engine, for a size that cannot be read, and for a
    card that is smaller than the largest model. Raises GpuError for an empty `history`.
    """
    if not history.requests:
        raise GpuError(
            "there is nothing to replay: the history has no use of a model.\n"
            "  Replay a trace:  gpu backtest --requests FILE --models FILE"
        )
    for name in policies:
        if name not in (*POLICIES, CLAIRVOYANT):
            raise BadSetting("policy", name, f"one of {', '.join(POLICIES)}")
    for name in engines:
        if name not in ENGINES:
            raise BadSetting("engine", name, f"one of {', '.join(ENGINES)}")
    for what, sizes in (("device", devices), ("host", hosts)):
        if not sizes:
            raise BadSetting(what, "", "a size such as 80GB, or a percent such as 20%")
    cards = [_card(text, history) for text in devices]
    memories = [_bytes(text, history, "host") for text in hosts]
    for card, memory in product(cards, memories):
        yield from _rows(history, card, memory, policies, engines)


def _rows(
    history: UseHistory, card: int, memory: int, policies: Sequence[str], engines: Sequence[str]
) -> Iterator[BacktestRow]:
    """The rows for one card size and one host memory size, with the reference row first."""
    choices = [REFERENCE, (CLAIRVOYANT, "plain"), *product(policies, engines)]
    reference = 0.0
    for name, engine in dict.fromkeys(choices):
        rank = _clairvoyant(history) if name == CLAIRVOYANT else policy(name)
        result = replay(history, card, memory, rank, ENGINES[engine])
        if (name, engine) == REFERENCE:
            reference = result.wait_seconds
        yield _row(name, engine, card, memory, result, reference)


def _row(
    name: str, engine: str, card: int, memory: int, result: Result, reference: float
) -> BacktestRow:
    waited = result.wait_seconds
    if reference:
        ratio = waited / reference
    else:
        ratio = 1.0 if not waited else float("inf")
    return BacktestRow(
        name,
        engine,
        card,
        memory,
        len(result.waits),
        round(waited, 3),
        round(result.percentile(0.50), 3),
        round(result.percentile(0.99), 3),
        result.loads,
        result.restores,
        result.moved_bytes,
        round(len(result.waits) / result.seconds, 4) if result.seconds else 0.0,
        round(ratio, 4),
    )


def _card(text: str, history: UseHistory) -> int:
    size = _bytes(text, history, "device")
    if text.strip().endswith("%"):
        return max(size, history.largest)
    if size < history.largest:
        largest = max(history.models.values(), key=lambda model: model.bytes)
        raise BadSetting(
            "device", text, f"at least {largest.bytes / 1e9:.1f}GB, the size of {largest.name}"
        )
    return size


def _bytes(text: str, history: UseHistory, what: str) -> int:
    """The bytes of a size such as `80GB`, or of a percentage of the bytes of all models."""
    words = text.strip()
    try:
        if words.endswith("%"):
            share = float(words[:-1]) / 100
            if share < 0 or share != share or share == float("inf"):
                raise ValueError
            return int(history.bytes * share)
        return parse_bytes(words)
    except (BadSize, ValueError):
        raise BadSetting(what, text, "a size such as 80GB, or a percent such as 20%") from None


def _clairvoyant(history: UseHistory) -> Policy:
    """A policy that evicts the model whose next use is farthest in the future."""
    times: dict[str, list[float]] = {}
    for request in history.requests:
        times.setdefault(request.model, []).append(request.seconds)

    def next_use(lease: Lease, world: World) -> float:
        """The rank of `lease`; the lowest rank is evicted first.

        The rank is the negated seconds until the next use, or -inf if there is no later use.
        """
        uses: list[float] = times[lease.name]
        later = bisect_right(uses, world.now)
        return -(uses[later] - world.now) if later < len(uses) else float("-inf")

    return next_use


def split_words(text: str | Iterable[str]) -> tuple[str, ...]:
    """The words of `text`, which are separated by commas. If `text` is a sequence, its items are returned.

    >>> split_words("lru, keep_score")
    ('lru', 'keep_score')
    """
    if not isinstance(text, str):
        return tuple(text)
    return tuple(word.strip() for word in text.split(",") if word.strip())
