"""The examples in docstrings run and give the results that they show."""

import builtins
import doctest
import importlib
import re
from pathlib import Path

import pytest

import gpu_runtime

ROOTS = (Path(gpu_runtime.__file__).parent, Path(__file__).parents[1])


def _modules_with_examples() -> list[str]:
    """The names of the modules of gpu_runtime and of the tests that contain examples."""
    names = []
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE):
                parts = path.relative_to(root.parent).with_suffix("").parts
                names.append(".".join(part for part in parts if part != "__init__"))
    return names


@pytest.mark.parametrize("name", _modules_with_examples())
def test_the_examples_of_a_module_give_what_they_show(name):
    failed, tried = doctest.testmod(importlib.import_module(name))
    vars(builtins).pop(
        "_", None
    )  # doctest leaves the last value there, and IPython then keeps its own back
    assert tried and not failed
