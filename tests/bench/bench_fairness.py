"""Compares the waits of users with and without GPU_FAIRNESS: `python -m tests.bench.bench_fairness REQUESTS MODELS`.

The two files are a history, as for `gpu backtest`. Each model is given to one of eight users by chance: the first user
gets about twice as many models as the second, three times as many as the third, and so on. All requests are of equal
importance, and each use lasts twice as long as recorded, so that more requests wait at a time. The card holds a tenth
of the bytes of all models, and nothing stays in RAM.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from random import Random

from msgspec.structs import replace

from gpu_runtime.backtest import CARD, FULL, HistoryRequest, UseHistory, _Replay, read_history
from gpu_runtime.facts import NORMAL
from gpu_runtime.owner.session import HALF_LIFE_SECONDS
from gpu_runtime.scheduler.policies import keep_score

USERS, SEEDS, SLOWER = 8, (1, 2, 3, 4, 5), 2.0


class Shared(_Replay):
    """A replay in which each model has a user. It counts the waits and the card-hours of each user."""

    def __init__(self, history: UseHistory, users: dict[str, str], fair: bool) -> None:
        card = max(history.bytes // 10, history.largest)
        super().__init__(history, card, 0, keep_score, FULL, 0)
        self.users, self.fair, self.card_bytes = users, fair, card
        self.recent: dict[str, float] = defaultdict(
            float
        )  # card-hours; with fairness old ones fade
        self.hours: dict[str, float] = defaultdict(float)
        self.waits_of: dict[str, list[float]] = defaultdict(list)

    def _advance(self, seconds: float) -> None:
        past = seconds - self.world.now
        for user in self.recent:
            self.recent[user] *= 0.5 ** (past / HALF_LIFE_SECONDS)
        for lease in self.book.leases():
            hours = lease.bytes_on(CARD) / self.card_bytes * past / 3600
            self.recent[self.users[lease.name]] += hours
            self.hours[self.users[lease.name]] += hours
        super()._advance(seconds)

    def _past_use(self, model: str) -> float | None:
        return round(self.recent[self.users[model]], 1) if self.fair else None

    def _queue(self, model: str) -> None:
        super()._queue(model)
        if ticket := self.book.ticket(model):
            self.book = self.book.with_ticket(replace(ticket, past_use=self._past_use(model)))

    def _try(self, model: str) -> bool:
        rules = replace(self.world.rules, past_use=self._past_use(model))
        self.world = replace(self.world, rules=rules)
        return super()._try(model)

    def _start(self, request: HistoryRequest) -> None:
        waited = self.world.now - request.seconds
        self.waits_of[self.users[request.model]].append(waited)
        super()._start(request)


def gini(values: Iterable[float]) -> float:
    """The Gini coefficient: 0 if all `values` are equal, near 1 if one of them is all."""
    ordered = sorted(values)
    count, total = len(ordered), sum(ordered)
    ranked = sum(rank * value for rank, value in enumerate(ordered, 1))
    return 2 * ranked / (count * total) - (count + 1) / count


def figures(history: UseHistory, seed: int, fair: bool) -> tuple[float, float, float]:
    """The Gini coefficients of the waits per request and per card-hour of each user, and the seconds of all waits."""
    random = Random(seed)
    shares = [1 / (number + 1) for number in range(USERS)]
    users = {
        model: f"u{random.choices(range(USERS), shares)[0]}" for model in sorted(history.models)
    }
    replay = Shared(history, users, fair)
    waited = replay.run().wait_seconds
    sums = {user: sum(waits) for user, waits in replay.waits_of.items()}
    by_request = gini(sums[user] / len(replay.waits_of[user]) for user in sums)
    by_hour = gini(sums[user] / replay.hours[user] for user in sums)
    return by_request, by_hour, waited


def main(requests: str, models: str, most: str = "3000") -> None:
    """Prints a row for each seed. Only the first `most` requests are replayed."""
    history = read_history(requests, models)
    slower = tuple(
        one._replace(service_seconds=one.service_seconds * SLOWER, importance=NORMAL)
        for one in history.requests[: int(most)]
    )
    for seed in SEEDS:
        off, fair = (
            figures(UseHistory(history.models, slower), seed, way) for way in (False, True)
        )
        changes = [f"{after / before - 1:+.0%}" for before, after in zip(off, fair, strict=True)]
        shown = [f"{off[n]:.3f} → {fair[n]:.3f} ({changes[n]})" for n in (0, 1)]
        print(
            f"| {seed} | {shown[0]} | {shown[1]} | {off[2] / 3600:.1f} → {fair[2] / 3600:.1f} h ({changes[2]}) |",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
