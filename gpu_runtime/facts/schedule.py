"""The schedule of a notebook: the running and the waiting cells, and the models that they use."""

from __future__ import annotations

from .base import Value


class CellModels(Value):
    """The models that the text of a running or waiting cell names."""

    cell: str  # such as "cell 7"
    uses: tuple[str, ...] = ()  # models that the cell brings onto a device, in order
    mentions: tuple[str, ...] = ()  # all models that the cell names
    running: bool = False


class ScheduledModel(Value):
    """A model that the running cell or a waiting cell uses."""

    name: str
    cell: str  # the first cell that uses it
    running: bool  # whether that cell runs now
    where: str  # sim:0, host, or disk
    ahead: bool = False  # whether it was loaded before its cell began
    loading: bool = False  # whether it is being loaded now
    because: str = ""  # why it is not loaded ahead now; empty if it is on its device


class Schedule(Value):
    """The models of the running cell and the waiting cells, and counts of models loaded ahead."""

    mode: str = "auto"  # the setting GPU_PREFETCH
    cells: tuple[CellModels, ...] = ()  # the running cell and the waiting ones, in order
    models: tuple[ScheduledModel, ...] = ()  # in the order of their first use
    loaded_ahead: int = 0  # models that this process loaded ahead since it started
    used: int = 0  # models loaded ahead that a cell then used
    unused: int = 0  # models loaded ahead that were evicted unused, or that no cell needs now
