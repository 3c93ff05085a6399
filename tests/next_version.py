"""The next minor version of gpu-console: this code with another number, and with more fields in its facts and messages.

As in a real later version, nothing but the new field is there where an earlier version has written a fact.
"""

import shutil
from pathlib import Path

from gpu_runtime.version import VERSION

ROOT = Path(__file__).parents[1]
NEXT = "0.4.0"
BOOK = "gpu_runtime/facts/book.py"
KEEPER, PIECES = "gpu_runtime/ledgers/keeper/core.py", "gpu_runtime/ledgers/pieces.py"
BUILT, STEPS = "gpu_runtime/devices/probe.py", "gpu_runtime/scheduler/transitions.py"
VISITORS = "    visitors: tuple[str, ...] = ()\n"
# File, text, and what the next version has after it.
MORE = (
    (BOOK, "omit_defaults=True, gc=False", ", kw_only=True"),
    # in every fact, and always written
    (
        BOOK,
        ", kw_only=True):\n",
        "    later: str = msgspec.field(default_factory=lambda: 'later')\n",
    ),
    (BOOK, "    simulated: bool = False\n", "    bus: str = ''\n"),
    (BUILT, "index, simulated=True", ", bus='7'"),
    (BOOK, "    beside: tuple[str, ...] = ()\n", "    origin: str = ''\n"),
    (STEPS, "    event = Event(\n", "        origin=f'{world.now}',\n"),
    # a fact of all owners: who has been there
    (BOOK, "    opens: float = NEVER\n", VISITORS),
    (PIECES, "    opens: float = 0.0\n", VISITORS),
    (STEPS, "(known.values()), limits=limits", ", visitors=(*book.visitors, truth.owner.id)"),
    # messages, an owner's part, and what a keeper knows of the owners
    (KEEPER, "    watch: bool = False\n", "    later: str = 'later'\n"),
    (KEEPER, "    holds_below: dict[str, int] = {}  # see `Book`\n", "    later: str = 'later'\n"),
    (
        KEEPER,
        "# the number of this owner's last write that is in the book\n",
        "    later: str = ''\n",
    ),
    (PIECES, "# the number of the write\n", "    later: str = 'later'\n"),
    (PIECES, "    queue: tuple[str, ...]  # keys of tickets\n", "    later: str = 'later'\n"),
)


def next_version(name: str, text: str) -> str:
    """The `text` of the file `name` in the next version."""
    if name == "gpu_runtime/version.py":
        return text.replace(VERSION, NEXT)
    for file, before, more in MORE:
        if file == name:
            assert text.count(before) == 1, f"{name} has changed: {before}"
            text = text.replace(before, before + more)
    return text


def copy_of_next_version(folder: Path) -> Path:
    """A tree with the packages of the next version, for PYTHONPATH."""
    for package in ("gpu_runtime", "kernel_ext/gpu"):
        there = folder / Path(package).name
        shutil.copytree(ROOT / package, there, ignore=shutil.ignore_patterns("__pycache__"))
    for name in {name for name, *_ in MORE} | {"gpu_runtime/version.py"}:
        (folder / name).write_text(next_version(name, (folder / name).read_text()))
    return folder
