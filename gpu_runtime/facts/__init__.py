"""Frozen values that all folders exchange. Processes exchange these values as JSON.

The values describe devices, models, leases, the book (all leases and requests of a host), decisions
and snapshots. Nothing here decides or acts: no locks, tensors or clocks. Sizes are in bytes. Times
are seconds of CLOCK_BOOTTIME, unless the name contains `wall`.
"""

# ruff: noqa: F401 - the names of this package are those that it imports

from __future__ import annotations

from .allocators import (
    AllocatorBlock,
    AllocatorMap,
    BlockState,
    SegmentMap,
)
from .base import (
    HOST,
    KERNEL,
    MOST_ENTRIES,
    MOST_EVENTS,
    NEVER,
    SCHEMA,
    Value,
    encode,
)
from .book import (
    Book,
    Drain,
    Event,
    Ghost,
    decode_book,
    overdrafts,
)
from .decisions import (
    Asker,
    Candidate,
    Cap,
    Drop,
    Grant,
    Load,
    Move,
    PlacementRules,
    Plan,
    PlanLevel,
    Policy,
    Refuse,
    Request,
    Rules,
    Shed,
    Step,
    Verdict,
    Wait,
    World,
)
from .devices import (
    Device,
    Sample,
    Share,
    Shares,
    beside,
    one_memory,
    where,
)
from .holdings import Holder, Holdings
from .importance import IMPORTANCE, NORMAL, OVER_CAP, importance_name, parse_importance
from .labels import (
    TENSOR_PARALLEL,
    THIS_PROCESS,
    LeaseState,
    bytes_label,
    cards_label,
    ended_label,
    holder_label,
    lease_state,
    lease_title,
    notebooks_in,
    place_label,
)
from .leases import (
    Lease,
    LeaseId,
    Owner,
    Phase,
    Section,
    Staying,
    Ticket,
)
from .models import (
    UNDECLARED,
    Declared,
    Evidence,
    Footprint,
    Measurement,
    ModelSpec,
    Part,
)
from .notebooks import EVICTED, PASSING, held_on_cards, notebook_has_name, of_notebook
from .offers import HostRoom, Offer
from .problems import Problem, ProblemKind, problems
from .recent_uses import MOST_USES, decode_uses, encode_uses, expected_use, merged_uses
from .replays import Decided, Replayed
from .schedule import CellModels, Schedule, ScheduledModel
from .snapshot import (
    UNUSUAL,
    Applied,
    DeviceView,
    Health,
    History,
    Level,
    Moment,
    Outcome,
    Presence,
    ProcessState,
    Snapshot,
    Stranger,
    Unanswered,
)
