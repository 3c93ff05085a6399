"""Every figure with its target: `python -m tests.bench` prints the rows, `--write` puts them into RESULTS.md.

The figures are ratios and medians of one run on one machine. Compared values are measured side by side. The test
suite does not run this module. Each part is the module `bench_` with its name.
"""

import argparse
import importlib
import os
import traceback

from .results import HEAD, RESULTS, merged, this_machine

PARTS = (
    "imports", "parking", "ahead", "use", "admit", "placement", "week", "ledger", "restore", "shared", "idle", "fleet",
    "fleet_calls", "estimate", "history", "crowd", "recall", "console", "engines", "sleep", "serving", "http", "served",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", nargs="*", choices=[[], *PARTS], help="only these")
    parser.add_argument("--write", action="store_true", help="put the rows into RESULTS.md")
    parser.add_argument("--note", default="", help="put behind the machine's name")
    wanted = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process compiles all modules anew
    print(HEAD)
    failed, lines = [], []
    for name in wanted.which or PARTS:
        try:
            for row in importlib.import_module(f".bench_{name}", __package__).rows():
                lines.append(row.line(this_machine() + wanted.note))
                print(lines[-1], flush=True)
                if wanted.write:
                    RESULTS.write_text(merged(RESULTS.read_text(), lines[-1:]))
        except Exception:  # the other parts are measured all the same
            traceback.print_exc()
            failed.append(name)
    if wanted.write and not wanted.which and not failed:  # what no part measures any more leaves
        RESULTS.write_text(merged(RESULTS.read_text(), lines, all_parts=True))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
