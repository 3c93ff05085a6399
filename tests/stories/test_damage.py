"""A crowd works while its book (not the owners' own files) is damaged: no lease lost, no byte granted twice."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_runtime.errors import LedgerUnavailable
from gpu_runtime.ledgers.liveness import boot_id
from gpu_runtime.ledgers.sqlite import files
from tests import soak
from tests.stories.crowd import Report, Warden, crowd


class Vandal(Warden):
    """Damages the book at the moments at which the Warden class would kill a process."""

    forgives = (LedgerUnavailable,)
    damages = True

    def __init__(self, url: str, directory: Path, kernels: int, seed: int, calm: float) -> None:
        super().__init__(url, directory, kernels, seed, calm)
        self.home = Path(url.removeprefix("sqlite://")) / boot_id()
        self.struck: Counter[str] = Counter()

    def disturb(self) -> None:
        book = self.home / files.current(self.home)
        if not book.is_file():
            return  # the book is being repaired
        fault: Callable[[Path], object] = self.dice.choice(
            [
                self.bytes_flipped,
                self.digit_changed,
                self.truncated,
                self.unlinked,
                self.old_copy_over_it,
                self.old_copy_in_its_place,
                self.current_lost,
                self.journal_garbled,
            ]
        )
        try:
            fault(book)
            self.struck[fault.__name__] += 1
        except OSError:
            pass  # the book was repaired at that moment

    def bytes_flipped(self, book: Path) -> None:
        size = book.stat().st_size
        with open(book, "r+b") as file:
            for _ in range(self.dice.randint(1, 40)):
                at = self.dice.randrange(size)
                file.seek(at)
                byte = file.read(1) or b"\0"
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << self.dice.randrange(8)]))

    def digit_changed(self, book: Path) -> None:
        data = book.read_bytes()
        digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
        at = self.dice.choice(digits)
        with open(book, "r+b") as file:
            file.seek(at)
            file.write(b"%d" % ((data[at] - ord("0") + self.dice.randint(1, 9)) % 10))

    def truncated(self, book: Path) -> None:
        os.truncate(book, self.dice.randrange(book.stat().st_size))

    def unlinked(self, book: Path) -> None:
        book.unlink()

    def old_copy_over_it(self, book: Path) -> None:
        old = self.copied(book)
        self.let_them_work()
        if book.exists():
            with open(book, "r+b") as file:
                file.write(old.read_bytes())

    def old_copy_in_its_place(self, book: Path) -> None:
        old = self.copied(book)
        self.let_them_work()
        if book.exists():
            os.replace(old, book)

    def current_lost(self, book: Path) -> None:
        (self.home / "CURRENT").unlink()

    def journal_garbled(self, book: Path) -> None:
        Path(f"{book}-journal").write_bytes(self.dice.randbytes(3000))

    def copied(self, book: Path) -> Path:
        return Path(shutil.copy(book, self.directory / "old"))

    def let_them_work(self) -> None:
        time.sleep(self.dice.uniform(0, 0.03))


def strike(
    directory: Path, *, kernels: int, seconds: float, seed: int, calm: float
) -> tuple[Report, Counter[str]]:
    (directory / "slots").mkdir()
    with crowd(
        f"sqlite://{directory}/ledger",
        directory / "slots",
        kernels=kernels,
        seed=seed,
        calm=calm,
        kind=Vandal,
    ) as vandal:
        report = vandal.run(seconds)
    print(report, dict(vandal.struck))
    assert not report.wrong, "\n".join(report.wrong)
    return report, vandal.struck


def test_a_crowd_outlives_the_damage_of_its_book(tmp_path):
    report, struck = strike(tmp_path, kernels=6, seconds=8, seed=1, calm=0.1)
    assert len(struck) == 8 and struck.total() > 40
    assert report.served > 50 and report.looks > 100


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(20, 24))
def test_a_crowd_outlives_a_thousand_faults(tmp_path, seed):
    report, struck = strike(
        tmp_path, kernels=(4, 8, 16, 32)[seed % 4], seconds=60, seed=seed, calm=0.08
    )
    soak.add("sqlite", damage_faults=struck.total(), blocks_served_on_a_damaged_book=report.served)
    assert struck.total() > 250 and report.served > 50
