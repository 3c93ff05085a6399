"""Frozen values that all folders exchange. Processes exchange these values as JSON.

The values describe devices, models, leases, the book (all leases and requests of a host), decisions
and snapshots. Nothing here decides or acts: no locks, tensors or clocks. Sizes are in bytes. Times
are seconds of CLOCK_BOOTTIME, unless the name contains `wall`.
"""

# ruff: noqa: F401 - the names of this package are those that it imports

from __future__ import annotations

from .answers import (
    AllocatorBlock,
    AllocatorMap,
    BlockState,
    CellModels,
    Decided,
    Holder,
    Holdings,
    HostRoom,
    Offer,
    Replayed,
    Schedule,
    ScheduledModel,
    SegmentMap,
)
from .base import (
    HOST,
    IMPORTANCE,
    KERNEL,
    MOST_ENTRIES,
    MOST_EVENTS,
    NEVER,
    NORMAL,
    OVER_CAP,
    SCHEMA,
    Value,
    encode,
    importance_name,
    parse_importance,
)
from .book import Book, Drain, Event, Ghost, decode_book, overdrafts
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
from .devices import Device, Sample, Share, Shares, beside, one_memory, where
from .engines import ENGINES, Engine
from .labels import (
    EVICTED,
    PASSING,
    THIS_PROCESS,
    bytes_label,
    cards_label,
    ended_label,
    held_on_cards,
    holder_label,
    lease_state,
    lease_title,
    notebook_has_name,
    notebooks_in,
    of_notebook,
    place_label,
)
from .leases import Lease, LeaseId, Owner, Phase, Section, Staying, Ticket
from .models import UNDECLARED, Declared, Evidence, Footprint, Measurement, ModelSpec, Part
from .problems import Problem, ProblemKind, problems
from .recent_uses import MOST_USES, decode_uses, encode_uses, expected_use, merged_uses
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
