"""Offers of hosts for a model: how much effort the use of the model would take on each host."""

from __future__ import annotations

from .base import Value
from .decisions import PlanLevel


class Offer(Value):
    """The answer of one host: the effort that a use of the model would take on this host."""

    host: str
    name: str  # the model
    level: PlanLevel
    because: str
    seconds: float = 0.0  # until the model can be used
    measured: bool = False  # whether the seconds were measured on that host; else estimated
    victims: tuple[str, ...] = ()  # names of the models that would be evicted
    # The importance of the most important victim; lower is more important. Without victims: 0.
    victims_importance: int = 0
    victims_wished: int = 0  # how much the fleet wishes the victim that it wishes most
    left_bytes: int = 0  # free bytes that stay on the fullest of the model's cards
    need_bytes: int = 0
    users: int = 0  # blocks that use the model on that host now
    answered: bool = True  # False: the host does not answer, or its agent is restarted


class HostRoom(Value):
    """The room of one host for a model. A fleet uses it to choose the hosts that make a plan."""

    host: str
    here: bool = False  # whether the model is on a device of the host
    warm: bool = False  # whether the model is in the host's memory
    drained: bool = False  # whether the host takes no new models
    need_bytes: int = 0  # the size of the model; 0: unknown
    may_split: bool = False  # whether the model may use several cards
    free_bytes: tuple[int, ...] = ()  # of each card
    budget_bytes: tuple[int, ...] = ()  # of each card
    # Importance and wish (see `Lease.wished`) -> for each card, the bytes of such idle leases.
    idle_bytes: dict[tuple[int, int], tuple[int, ...]] = {}
