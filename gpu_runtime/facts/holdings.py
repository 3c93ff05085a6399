"""What a process holds on its devices, by the names that refer to it."""

from __future__ import annotations

from .base import Value


class Holder(Value):
    """One name, and the device memory that it refers to."""

    name: str  # a variable, an output, a model, a thread or a module
    kind: str  # variable, output, last error, running, thread, model, or elsewhere
    device: str  # such as sim:0, or cuda:0,1
    bytes: int  # all storages that the name reaches; two names may reach the same one
    alone_bytes: int  # the bytes that become free if this name alone is deleted
    cell: str = ""  # the cell that made it, as In [7]; empty if unknown
    what: str = ""  # the class of the object, or who else refers to the memory


class Holdings(Value):
    """The device memory of this process: who refers to it, and what nobody explains.

    `held_bytes` is the sum of the other five.
    """

    holders: tuple[Holder, ...]
    held_bytes: int = 0
    explained_bytes: int = 0  # a name refers to them
    graph_bytes: int = 0  # only autograd graphs refer to them
    cached_bytes: int = 0  # reserved by the allocator, and not used
    unknown_bytes: int = 0  # storages without a name
    unseen_bytes: int = 0  # allocated, but no storage was found
    whole: bool = True  # False: the time was over before everything was searched
    seconds: float = 0.0
    # The next six are of another process's answer.
    process: str = ""  # such as train.ipynb (pid 4121)
    parked_bytes: int = 0  # that are parked in host memory
    left_out: int = 0  # smaller rows that are not listed
    left_out_bytes: int = 0  # that these rows reach
    note: str = ""  # why something is not listed
    stays: str = ""  # why its own code's memory cannot be parked now
