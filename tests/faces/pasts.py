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


def day(
    *,
    seconds: float = 86400.0,
    points: int = 600,
    cards: int = 1,
    gib: float = 24,
    seed: int = 1,
    busy: float = 1.0,
    end: float = WALL,
) -> History:
    """The history of `seconds` on `cards` cards: models are loaded, offloaded for one another and restored."""
    draw = random.Random(seed)
    step, limit = seconds / points, int(gib * 0.9 * GIB)
    moments, events = [], []
    for card in range(cards):
        claims: dict[str, int] = {}
        device = f"sim:{card}"
        for n in range(points + 1):
            wall = end - seconds + n * step
            if draw.random() < 0.08 * busy:
                name, pid, size = draw.choice(MODELS)
                need = size * GIB
                while sum(claims.values()) + need > limit:
                    victim = draw.choice(sorted(claims))
                    freed = claims.pop(victim)
                    events.append(
                        Event(
                            len(events) + 1,
                            wall,
                            victim.partition("@")[0],
                            draw.choice(["offloaded", "offloaded", "unloaded"]),
                            "memory_pressure",
                            f"{name} needs {size}.0 GiB and was asked for first.",
                            freed,
                            device,
                            f"{victim.partition('@')[2]}.10.0",
                        )
                    )
                events.append(
                    Event(
                        len(events) + 1,
                        wall,
                        name,
                        draw.choice(["loaded", "restored"]),
                        "request",
                        f"{name} needs {size}.0 GiB.",
                        need,
                        device,
                        f"{pid}.10.0",
                    )
                )
                claims[f"{name}@{pid}"] = need
            elif draw.random() < 0.03 * busy and claims:
                claims.pop(draw.choice(sorted(claims)))
            claimed = sum(claims.values())
            used = claimed + int(draw.uniform(0.3, 0.5) * GIB)
            full = max(claimed / limit, used / (gib * GIB))
            level = (Level.LOW, Level.MODERATE, Level.HIGH, Level.CRITICAL)[
                (full >= 0.6) + (full >= 0.8) + (full >= 0.9)
            ]
            moments.append(
                Moment(
                    wall,
                    device,
                    int(gib * GIB),
                    limit,
                    used,
                    level,
                    100 * draw.random(),
                    60.0,
                    250.0,
                    dict(claims),
                )
            )
    moments.sort(key=lambda moment: moment.wall)
    return History(tuple(moments), tuple(sorted(events, key=lambda event: event.wall)), seconds)
