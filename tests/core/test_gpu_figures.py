"""`make gpu-figures` measures a simulated accelerator with the same code as a real card."""

from __future__ import annotations

import datetime
import re

import pytest

from tests.bench import gpu_figures


@pytest.mark.thorough  # it measures for three seconds
def test_without_a_card_the_table_has_the_bytes_and_says_what_was_not_run(capsys, monkeypatch):
    monkeypatch.setattr(gpu_figures, "ROUNDS", 1)
    monkeypatch.setattr(gpu_figures.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_figures, "LAYER_BYTES", 1 << 20)
    gpu_figures.main(["--gib", "0.02"])
    first, _, *table = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Measured {datetime.date.today()}, simulated accelerator, ")
    rows = [re.split(r" \| ", line.strip("| ")) for line in table[2:]]
    reached = {what.partition(" ")[0] + what.partition(":")[2]: mark for what, *_, mark in rows}
    del reached["restore"]  # a speed, which depends on the load of this machine
    assert reached == {
        "pinned": "not run",
        "duplex: one model out and another in at once, against the longer of the two": "not run",
        "clean bytes copied": "reached",
        "clean seconds": "not run",
        "1.0 bytes moved each way": "reached",
    }
