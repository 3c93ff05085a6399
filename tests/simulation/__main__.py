"""python -m tests.simulation --seed N: one day on a simulated box, the same day for the same seed.

--seeds N      as many seeds, from --seed on (default 1); only failures are printed
--seconds S    how much time passes in each, by its own clock (default 120)
--first        ends at the first failure
--branches     fails if more branches of the decisions were never met than in 100 days once
--plain        looks for no shorter day that fails in the same way
--trace        prints what happens
"""

import argparse
import os
import pickle
import re
import sys
from collections import Counter
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of text depends on it
    os.execve(
        sys.executable,
        [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
        {**os.environ, "PYTHONHASHSEED": "0"},
    )

from . import branches, machine

machine.install()
branches.install()

from . import days  # noqa: E402 - after the locks and clocks were replaced

MOST_LINES, TRIES = 60, 6
SMALLER = (
    days.Limits(faults=("collect",)),
    days.Limits(kernels=2, users=2),
    days.Limits(kernels=2, users=2, faults=("collect",)),
    days.Limits(kernels=1, users=2, acts=("use", "evict", "preload", "keep")),
    days.Limits(kernels=2, users=1, acts=("use", "evict", "preload", "block")),
)
MANY = 100  # days, after which the branches that were not met are printed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--branches", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--trace", action="store_true")
    asked = parser.parse_args()
    days.Day(0, 20.0, None, days.Limits()).run()  # imports what is imported late, which takes locks
    failed, met, owner_seconds = 0, Counter[str](), 0.0
    for seed in range(asked.seed, asked.seed + asked.seeds):
        day = in_a_child(seed, asked.seconds, print if asked.trace else None)
        met += day["met"]
        branches.met += day["branches"]
        owner_seconds += day["owner_seconds"]
        if day["why"]:
            failed += 1
            print(f"seed {seed}: {day['why']}", flush=True)
            if failed == 1 and not asked.plain:
                print(shorter(seed, asked.seconds, day), flush=True)
            if asked.first:
                break
    print(f"{asked.seeds} days, {failed} failed; {owner_seconds / 3600:.1f} owner-hours")
    print(", ".join(f"{name} {count}" for name, count in sorted(met.items())))
    never = branches.never_met()
    print(f"{len(branches.lines) - len(never)} of {len(branches.lines)} branches of the decisions")
    if asked.branches or asked.seeds >= MANY:
        print("\n".join(f"never met: {one}" for one in never))
    return int(failed > 0 or (asked.branches and len(never) > branches.MOST_UNMET))


def shorter(seed: int, seconds: float, failed: dict[str, Any]) -> str:
    """The shortest trace of a smaller day that fails in the same way, if it has less than MOST_LINES."""

    def kind(day: dict[str, Any]) -> str:
        return re.sub(r"[\d.]+", "#", day["why"].partition("\n")[0])[:40]

    best, with_ = failed, ""
    for limits in SMALLER:
        for other in range(seed, seed + TRIES):
            day = in_a_child(other, seconds, None, limits)
            if kind(day) == kind(failed) and len(day["lines"]) < len(best["lines"]):
                best, with_ = day, f"The same with {limits}, seed {other}:\n"
                seconds = min(seconds, day["seconds"])
    if len(best["lines"]) >= MOST_LINES:
        return f"  (no trace below {MOST_LINES} lines was found)"
    return f"{with_}{chr(10).join(best['lines'])}\n{best['why']}"


def in_a_child(
    seed: int,
    seconds: float,
    trace: Any,
    limits: days.Limits = days.Limits(),  # noqa: B008
) -> dict[str, Any]:
    """One day, in a child that ends with it: no day finds what an earlier one has left."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    if os.fork() == 0:
        day = days.Day(seed, seconds, trace, limits)
        branches.met.clear()
        done = {"why": day.run(), "met": day.box.met, "owner_seconds": day.owner_seconds}
        done |= {"branches": branches.met, "lines": day.lines}
        done["seconds"] = day.machine.now - machine.BEGAN
        with open(writing, "wb") as result:
            pickle.dump(done, result)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as result:
        content = result.read()
    os.wait()
    if not content:
        return {
            "why": "it has crashed",
            "met": {},
            "owner_seconds": 0.0,
            "branches": {},
            "lines": [],
        }
    return pickle.loads(content)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the runtimes of the first day have no box any more to leave
