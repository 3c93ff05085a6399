"""python -m tests.simulation --seed N: one day on a simulated box, the same day for the same seed.

--seeds N      as many seeds, from --seed on (default 1); only failures are printed
--seconds S    how much time passes in each, by its own clock (default 120)
--trace        prints what happens
"""

import argparse
import os
import sys
from collections import Counter

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of text depends on it
    os.execve(
        sys.executable,
        [sys.executable, "-m", "tests.simulation", *sys.argv[1:]],
        {**os.environ, "PYTHONHASHSEED": "0"},
    )

from . import machine

machine.install()

from . import days  # noqa: E402 - after the locks and clocks were replaced


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--trace", action="store_true")
    asked = parser.parse_args()
    failed, met, owner_seconds = 0, Counter[str](), 0.0
    for seed in range(asked.seed, asked.seed + asked.seeds):
        day = days.Day(seed, asked.seconds, print if asked.trace else None)
        why = day.run()
        met += day.box.met
        owner_seconds += day.owner_seconds
        if why:
            failed += 1
            print(f"seed {seed}: {why}", flush=True)
    print(f"{asked.seeds} days, {failed} failed; {owner_seconds / 3600:.1f} owner-hours")
    print(", ".join(f"{name} {count}" for name, count in sorted(met.items())))
    return int(failed > 0)


status = main()
sys.stdout.flush()
os._exit(status)  # the runtimes of ended days would be closed now, and their threads have ended
