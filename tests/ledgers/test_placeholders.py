"""The SQL statements of the package, as newer versions of Python read them."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "gpu_runtime" / "ledgers"


def test_no_statement_numbers_its_placeholders():
    """Python 3.12 warns about `?1` with a tuple of values, and Python 3.14 refuses it."""
    numbered = re.compile(r"[=(,<>] ?\?[0-9]")
    found = [path.name for path in SOURCES.rglob("*.py") if numbered.search(path.read_text())]
    assert not found
