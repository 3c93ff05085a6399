"""What Python 3.10 lacks. With the end of 3.10, this module goes, and its users import from the standard library."""

from __future__ import annotations

import operator
import sys
from importlib import import_module
from typing import Any

if sys.version_info >= (3, 11):
    from enum import StrEnum
    from operator import call
    from typing import dataclass_transform
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """An enumeration whose members are text, also when they are shown."""

        __str__, __format__ = str.__str__, str.__format__

    call = operator.methodcaller("__call__")  # in C too: no interrupt comes between two calls

    def dataclass_transform(**_: Any) -> Any:
        """For type checkers only."""
        return lambda kind: kind


def toml() -> Any:
    """The module that reads TOML. It is imported when it is needed, because it takes 2 ms."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ModuleNotFoundError:  # in a kernel of `gpu box install`, see box.py
            tomllib = import_module("gpu_runtime.box_tomli")
    return tomllib


__all__ = ["StrEnum", "call", "dataclass_transform", "toml"]
