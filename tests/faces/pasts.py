"""A day on a shared box: moments and events as the sampler and the journal would record them. They
are drawn with a seed.
"""

import random

from gpu_runtime.facts import Event, History, Level, Moment

from .samples import GIB, WALL

MODELS = (
    ("qwen", 4121, 14), ("llama", 4000, 8), ("reranker", 4121, 3), ("bge", 4300, 2),
    ("whisper", 4300, 4), ("sdxl", 4555, 9), ("mistral", 4000, 15), ("phi", 4700, 5),
    ("gemma", 4121, 10), ("cell#1", 4555, 6),
)  # fmt: skip
EVICTED, ARRIVED = ("offloaded", "offloaded", "unloaded"), ("loaded", "restored")
POINTS, CARD = 600, 24 * GIB
LIMIT = int(0.9 * CARD)


def day(*, seconds: float = 86400.0, busy: float = 1.0) -> History:
    """The history of the last `seconds` on one card: models are loaded, offloaded for one another and restored."""
    draw = random.Random(1)
    moments, events = [], []
    claims: dict[str, int] = {}

    def happened(wall, lease, actions, reason, because, size):
        name, _, pid = lease.partition("@")
        what = (name, draw.choice(actions), reason, because, size, "sim:0", f"{pid}.10.0")
        events.append(Event(len(events) + 1, wall, *what))

    for n in range(POINTS + 1):
        wall = WALL - seconds + n * seconds / POINTS
        if draw.random() < 0.08 * busy:
            name, pid, size = draw.choice(MODELS)
            need = f"{name} needs {size}.0 GiB"
            while sum(claims.values()) + size * GIB > LIMIT:
                victim = draw.choice(sorted(claims))
                freed = claims.pop(victim)
                why = f"{need} and was asked for first."
                happened(wall, victim, EVICTED, "memory_pressure", why, freed)
            happened(wall, f"{name}@{pid}", ARRIVED, "request", f"{need}.", size * GIB)
            claims[f"{name}@{pid}"] = size * GIB
        elif draw.random() < 0.03 * busy and claims:
            claims.pop(draw.choice(sorted(claims)))
        claimed = sum(claims.values())
        used = claimed + int(draw.uniform(0.3, 0.5) * GIB)
        full = max(claimed / LIMIT, used / CARD)
        level = list(Level)[(full >= 0.6) + (full >= 0.8) + (full >= 0.9)]
        figures = (level, 100 * draw.random(), 60.0, 250.0, dict(claims))
        moments.append(Moment(wall, "sim:0", CARD, LIMIT, used, *figures))
    return History(tuple(moments), tuple(events), seconds)
