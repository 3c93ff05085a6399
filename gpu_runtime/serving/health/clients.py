"""Who asks how often, of which models, and who is to wait before asking again.

A client is the person that the token named, and the name that their program gave itself (`x_client_id`). A cooldown is
asked for by the client itself or by its profile, and counts for nobody else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ...facts import Value
from ..requests import Refused

MOST_CLIENTS = 1000  # remembered; the one that was quiet for longest goes first
MOST_MODELS = 20  # remembered of each
_WEIGHT = 0.2  # of the newest interval in the mean


class Pattern(Value):
    """How a client asks."""

    calls: int = 0
    refused: int = 0  # while in cooldown
    running: int = 0
    last_at: float = 0.0
    every_seconds: float | None = (
        None  # between its calls, the newest weighing most; None: it called once
    )
    models: dict[str, int] = {}  # calls of each
    cooldown_until: float = 0.0


class Clients:
    """What is remembered of the clients, the latest last. `now` is of the caller's clock."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Pattern] = OrderedDict()

    def enter(self, client: str, model: str, now: float) -> None:
        """Notes a call. Raises Refused (429) while the client is in cooldown."""
        known = self._known.pop(client, Pattern())
        if now < known.cooldown_until:
            left = known.cooldown_until - now
            self._keep(client, known, refused=known.refused + 1)
            raise Refused(
                429,
                "cooldown",
                f"{client or 'this client'} is in cooldown for another {left:.1f} s, as it "
                f"asked to be held to.",
                left,
                client=client,
            )
        gap = now - known.last_at
        every = known.every_seconds
        if known.calls:
            every = gap if every is None else every + _WEIGHT * (gap - every)
        models = {**known.models, model: known.models.get(model, 0) + 1}
        if len(models) > MOST_MODELS:
            models.pop(
                min((name for name in models if name != model), key=lambda name: models[name])
            )
        self._keep(
            client,
            known,
            calls=known.calls + 1,
            running=known.running + 1,
            last_at=now,
            every_seconds=every,
            models=models,
        )

    def left(self, client: str, cooldown: float, now: float) -> None:
        """Notes a call's end; from now on the client is in cooldown for so many seconds."""
        known = self._known.get(client)
        if known is not None:
            until = (
                max(known.cooldown_until, now + cooldown) if cooldown > 0 else known.cooldown_until
            )
            self._keep(client, known, running=max(0, known.running - 1), cooldown_until=until)

    def patterns(self) -> dict[str, Pattern]:
        return dict(self._known)

    def _keep(self, client: str, known: Pattern, **changes: Any) -> None:
        fields = {name: getattr(known, name) for name in Pattern.__struct_fields__}
        self._known[client] = Pattern(**{**fields, **changes})
        while len(self._known) > MOST_CLIENTS:
            quiet = next(
                (name for name, pattern in self._known.items() if not pattern.running), None
            )
            if quiet is None:
                return
            del self._known[quiet]
