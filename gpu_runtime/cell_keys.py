"""The key of a notebook's cell, and whether the memory that the cell took in its last run is known.

`telemetry/measurements.py` keeps these bytes in a file. A kernel without a lease looks there before
each cell. So this module imports only modules that a kernel has loaded anyway. An import of
`telemetry/measurements.py` would add 60 ms to the kernel's first cell.
"""

from __future__ import annotations

import hashlib
import json
import os
import re

from .private_paths import state_home

FILE = "cells.json"  # in the state directory, see telemetry/measurements.py
MAGIC_LINE = re.compile(r"(?:[\w\s,*]+=)?\s*%gpu(?:ctl)?\b")


def cell_key(notebook: str, text: str) -> str:
    """The key of the cell with the code `text` in the notebook at the path `notebook`.

    The key is empty for a cell without code, and for a cell of `%gpu` lines only: such a cell takes
    no memory by itself, and what its commands load requests its own room. The key is a digest, so
    the file contains neither code nor names.

    >>> cell_key("a.ipynb", "# who holds it?\\n%gpu who\\ndf = %gpu leases")
    ''
    """
    text = text.strip()
    lines = [line.strip() for line in text.splitlines()]
    if all(not line or line.startswith("#") or MAGIC_LINE.match(line) for line in lines):
        return ""
    return hashlib.sha256(f"{notebook}\0{text}".encode("utf-8", "replace")).hexdigest()[:20]


def is_remembered(key: str) -> bool:
    """Whether this user's file has the bytes that the cell with this `key` took.

    The file is in /var/tmp if the state directory is on a network file system. The check for this
    is in `ledgers/access.py`, which a kernel has not loaded yet, so both directories are searched.
    """
    for directory in (state_home(), f"/var/tmp/gpu-console-{os.geteuid()}"):
        try:
            with open(f"{directory}/{FILE}", "rb") as file:
                known = json.load(file)
            if key in known["cell_bytes"]:
                return True
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # no file, or a damaged one: nothing is known
            continue
    return False
