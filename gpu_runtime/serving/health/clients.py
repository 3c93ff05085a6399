"""Records how often each client calls which models, and which clients are in cooldown.

A client is a visitor together with the name that the calling program gives itself (`x_client_id`). A cooldown is set
by the client itself or by its profile, and applies to that client only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from msgspec.structs import replace

from ...facts import Value
from ..requests import Refused

# Beyond this number, the client whose last call is the oldest is forgotten, unless one of its calls still runs.
MAX_CLIENTS = 1000
MAX_MODELS = 20  # remembered for each client
_NEWEST_WEIGHT = 0.2  # the weight of the newest interval in the moving average


class Pattern(Value):
    """How one client calls."""

    calls: int = 0
    refused: int = 0  # calls during a cooldown
    running: int = 0
    last_at: float = 0.0
    # The weighted average of the seconds between calls. The newest interval has the most weight. None before the
    # second call.
    every_seconds: float | None = None
    models: dict[str, int] = {}  # calls of each model
    cooldown_until: float = 0.0


class Clients:
    """The known clients; the client with the most recent call is last. The caller passes the times."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Pattern] = OrderedDict()

    def enter(self, client: str, model: str, now: float) -> None:
        """Records a call of `model` by `client` at the time `now`. Raises Refused (429) during a cooldown."""
        known = self._known.pop(client, Pattern())
        if now < known.cooldown_until:
            self._keep(client, known, refused=known.refused + 1)
            seconds, who = known.cooldown_until - now, client or "this client"
            text = f"{who} is in cooldown for another {seconds:.1f} s, as it requested."
            raise Refused(429, "cooldown", text, seconds, client=client)
        self._keep(
            client,
            known,
            calls=known.calls + 1,
            running=known.running + 1,
            last_at=now,
            every_seconds=_average_interval(known, now),
            models=_count_model(known.models, model),
        )

    def leave(self, client: str, cooldown: float, now: float) -> None:
        """Records the end of a call of `client` at `now`, when its `cooldown` (seconds) begins."""
        known = self._known.get(client)
        if known is None:
            return
        until = max(known.cooldown_until, now + cooldown if cooldown > 0 else 0.0)
        self._keep(client, known, running=max(0, known.running - 1), cooldown_until=until)

    def patterns(self) -> dict[str, Pattern]:
        """The pattern of each client, by its name."""
        return dict(self._known)

    def _keep(self, client: str, known: Pattern, **changes: Any) -> None:
        self._known[client] = replace(known, **changes)
        while len(self._known) > MAX_CLIENTS:
            idle = (name for name, pattern in self._known.items() if not pattern.running)
            oldest = next(idle, None)
            if oldest is None:
                return
            del self._known[oldest]


def _average_interval(known: Pattern, now: float) -> float | None:
    if not known.calls:
        return known.every_seconds
    interval = now - known.last_at
    if known.every_seconds is None:
        return interval
    return known.every_seconds + _NEWEST_WEIGHT * (interval - known.every_seconds)


def _count_model(counts: dict[str, int], model: str) -> dict[str, int]:
    """Returns `counts` with one more call of `model`. Of too many models, the one with the fewest calls is left out."""
    counts = {**counts, model: counts.get(model, 0) + 1}
    if len(counts) > MAX_MODELS:
        others = [name for name in counts if name != model]
        del counts[min(others, key=lambda name: counts[name])]
    return counts
