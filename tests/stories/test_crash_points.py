"""A process is killed before any one change of the ledger's files (crash_points.c); no other is harmed."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from gpu_runtime.ledgers import open_ledger
from gpu_runtime.ledgers.base import Ledger
from gpu_runtime.ledgers.sqlite import files
from tests.clock import scaled
from tests.ledgers.conftest import names, put, without

REPO = Path(__file__).resolve().parents[2]
Say = Callable[[str], None]


# -- the deeds; each reports the writes that were acknowledged --------------------------------------------------------
def write(url: str, arm: Callable[[], None], say: Say) -> None:
    """Writes a second grant into a ledger that is open already. The kill is armed only for this write."""
    door = open_ledger(url)
    put(door, "qwen")
    arm()
    put(door, "qwen", *(f"llama-{n}" for n in range(30)))  # several pages of the file
    say("llama-7")


def live(url: str, arm: Callable[[], None], say: Say) -> None:
    """Does everything that a ledger does in its life: it opens, writes and closes."""
    arm()
    door = open_ledger(url)
    put(door, "qwen")
    say("qwen")
    say("")  # from here on, the write may or may not be in the book
    without(door, door.owner.id)
    door.close()


def mend(url: str, arm: Callable[[], None], say: Say) -> None:
    """Deletes the book. The next owner that opens the ledger makes a new one."""
    book = Path(url.removeprefix("sqlite://")).glob("*/book-*.db")
    os.unlink(next(book))
    live(url, arm, say)


def work(url: str, arm: Callable[[], None], say: Say) -> None:
    """Does the work of a kernel: it loads, uses and evicts a model, and ends."""
    arm()
    with Runtime(devices="sim:24GiB,host:64GiB", ledger=url, monitor=False) as rt:
        rt.register("qwen", backend="fake", size="3GiB")
        with rt.use("qwen"):
            say("qwen")
        rt.evict("qwen")
        say("")
        rt.forget("qwen")


DEEDS = {deed.__name__: deed for deed in (write, live, mend, work)}


# -- kill by kill -----------------------------------------------------------------------------------------------------
def kill_everywhere(url: str, deed: str, every: int = 1) -> int:
    """Runs the work again and kills it before each change; the number of changes. Fails if it harmed another."""
    library = ctypes.CDLL(None)
    directory = url.removeprefix("sqlite://").encode()
    neighbour = open_ledger(url)
    put(neighbour, "mine")
    at = 1
    while True:
        said, survived = done_by_another(
            DEEDS[deed], url, lambda at=at: library.crash_arm(directory, at)
        )
        judge(neighbour, said, f"{deed}, killed before change {at}", may_be_rebuilt=deed == "mend")
        if survived:
            break
        at += every
    look_for_leftovers(neighbour, url)
    return at - 1


def done_by_another(
    deed: Callable[..., None], url: str, arm: Callable[[], None]
) -> tuple[str, bool]:
    """Does the work in a forked process. Returns its last report, and whether it completed the work."""
    inbox, outbox = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            deed(url, arm, lambda what: os.write(outbox, f"{what}\n".encode()))
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(outbox)
    with open(inbox) as file:
        said = file.read().splitlines()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"it ended with {code}"
    return (said or [""])[-1], code == 0


def judge(neighbour: Ledger, said: str, when: str, *, may_be_rebuilt: bool) -> None:
    """After a kill: a valid book with all reported writes, dead owners can be reaped, a new grant works."""
    book = neighbour.read()
    assert "mine" in names(neighbour), f"{when}: a living neighbour lost its lease"
    assert not said or said in names(neighbour), (
        f"{when}: {said} was granted and is not in the book"
    )
    others = book.sections.keys() - {neighbour.owner.id}
    assert others == neighbour.dead(book), f"{when}: {others} cannot be proven dead"
    for id in others:
        without(neighbour, id)
    put(neighbour, "mine", "next")
    assert names(neighbour) == ["mine", "next"], when
    put(neighbour, "mine")
    if not may_be_rebuilt:
        assert not list(neighbour.directory.glob("*damaged*")), f"{when}: the book was damaged"


def look_for_leftovers(neighbour: Ledger, url: str) -> None:
    """Checks that the next owner that opens the ledger removes the unfinished files of dead processes."""
    for path in neighbour.directory.rglob("*"):
        os.utime(path, (0, 0), follow_symlinks=False)
    without(neighbour, neighbour.owner.id)
    open_ledger(url).close()
    neighbour.close()
    kept = {
        "CURRENT",
        "owners",
        "ballast",
        "rebuild.lock",
        "turn",
        "turn.pipe",
        "newest",
        *files.other_books(neighbour.directory, ""),
    }
    left = {path.name for path in neighbour.directory.rglob("*")} - kept
    assert not {name for name in left if "-journal" not in name and "damaged" not in name}, left


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("needs gcc, to build the library that counts and kills")
    there = tmp_path_factory.mktemp("library") / "crash_points.so"
    subprocess.run(
        [
            "gcc",
            "-O1",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
            there,
            REPO / "tests" / "crash_points.c",
            "-ldl",
        ],
        check=True,
    )
    return there


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("deed", DEEDS)
def test_a_kill_before_any_change_of_a_file_harms_nobody_else(deed, every, library, tmp_path):
    """Of the changes, each `every`-th is tried: each third one in an ordinary run."""
    every = 1 if deed == "write" else every
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.stories.test_crash_points",
            f"sqlite://{tmp_path}/ledger",
            deed,
            str(every),
        ],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": str(REPO), "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    print(ran.stdout)
    assert json.loads(ran.stdout) > {"write": 8, "live": 40, "mend": 40, "work": 60}[deed]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("every", type=int)
    given = parser.parse_args()
    print(json.dumps(kill_everywhere(given.url, given.deed, given.every)))
