"""What each cell of a notebook took at its peak when it last ran, in a small file of the user's own.

Nothing depends on this file: without it, a cell asks for no room beforehand.
"""

from __future__ import annotations

from ..cell_keys import FILE
from ..ledgers.location import local_state
from .measurements import Measurements


def peaks_of_this_user() -> Measurements:
    """The peaks of this user's cells. The file is read when a peak is looked up."""
    return Measurements(local_state() / FILE)
