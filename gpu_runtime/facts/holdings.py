"""The memory that a process holds on its devices, by the names that refer to the memory."""

from __future__ import annotations

from .base import Value
from .leases import Staying


class Holder(Value):
    """One name, and the device memory to which the name refers."""

    name: str  # a variable, an output, a model, a thread or a module
    kind: str  # variable, output, last error, running, thread, model, or elsewhere
    device: str  # such as sim:0, or cuda:0,1
    bytes: int  # all storages that the name reaches; two names may reach the same one
    alone_bytes: int  # bytes that become free if only this name is deleted
    cell: str = ""  # the cell that made the object, such as In [7]; empty if unknown
    what: str = ""  # the class of the object, or who else refers to the memory
    stays: str = ""  # why some of its bytes cannot leave their device; empty: all can
    stays_bytes: int = 0  # how many of its bytes


class Holdings(Value):
    """The device memory of one process: the names that refer to memory, and bytes without a name.

    `held_bytes` is the sum of the next five fields.
    """

    holders: tuple[Holder, ...]
    held_bytes: int = 0
    explained_bytes: int = 0  # a name refers to them
    graph_bytes: int = 0  # only autograd graphs refer to them
    cached_bytes: int = 0  # reserved by the allocator, and not used
    unknown_bytes: int = 0  # storages without a name
    unseen_bytes: int = 0  # allocated, but no storage was found
    whole: bool = True  # False: the time limit ended the search early
    seconds: float = 0.0
    staying: tuple[Staying, ...] = ()  # the bytes that cannot leave their device, by reason
    # The next six fields are set only in the answer of another process.
    process: str = ""  # such as train.ipynb (pid 4121)
    parked_bytes: int = 0  # bytes that are parked in host memory
    left_out: int = 0  # smaller rows that are not listed
    left_out_bytes: int = 0  # bytes that these rows refer to
    note: str = ""  # why something is not listed
    stays: str = ""  # why the memory of the notebook's own code cannot be parked now
