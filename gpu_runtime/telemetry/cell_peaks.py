"""The memory that each notebook cell took in its last run, in a small file of the user.

No other part depends on the file. If it is missing, no room is requested before a cell runs.
"""

from __future__ import annotations

from ..cell_keys import FILE
from ..ledgers.location import local_state
from .measurements import Measurements


def cells_of_this_user() -> Measurements:
    """The bytes that this user's cells took. The file is read only when they are requested from the
    result.
    """
    return Measurements(local_state() / FILE)
