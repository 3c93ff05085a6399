"""Digests of all that a notebook leaves: its tensors, arrays and random generators.

It runs inside the kernel of the notebook, which has no other file of the tests.
"""

import hashlib
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy
import torch

NOT_THE_NOTEBOOKS = ("In", "rt", "exit", "quit", "get_ipython")
LEAVES = (str, bytes, int, float, complex, type(None), type, type(sys), type(lambda: 0))
UNIQUE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # in the names that torch makes


def digests(variables: dict[str, Any]) -> str:
    """The digests as JSON, by the way from a variable to the value.

    `variables` are the global variables of the notebook. A dict with other keys than texts may have another order in
    each run, so its values share one name.
    """
    found = defaultdict(list)
    for name, value in _values(variables):
        found[name].append(_digest(value))
    found["random"] = [_of(repr(random.getstate()).encode())]
    found["numpy"] = [_of(repr(numpy.random.get_state()).encode())]
    found["torch"] = [_of(torch.get_rng_state().numpy().tobytes())]
    return json.dumps({name: " ".join(sorted(each)) for name, each in found.items()})


def _values(variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors, arrays and generators that the `variables` reach, each once, with the way to it."""
    names = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and name not in NOT_THE_NOTEBOOKS
    }
    waiting: list[tuple[str, Any]] = [("", names)]
    seen = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Tensor, numpy.ndarray, torch.Generator)):
            yield path, value
        if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
            waiting.append((f"{path}.grad", value.grad))
        for part, one in reversed(list(_parts(value))):
            waiting.append((f"{path}.{UNIQUE.sub('', part)}", one))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((key if isinstance(key, str) else "#", one) for key, one in [*value.items()])
    elif isinstance(value, (list, tuple)):
        yield from ((str(number), one) for number, one in enumerate(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((key, one) for key, one in [*attributes.items()] if isinstance(key, str))


def _digest(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return _of(value.get_state().numpy().tobytes())
    if isinstance(value, numpy.ndarray):
        return _of(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
    value = value.detach()
    if hasattr(value, "to_local"):
        value = value.to_local()  # a DTensor
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return f"{_digest(value.indices())} {_digest(value.values())}"
    if type(value) not in (torch.Tensor, torch.nn.Parameter) and hasattr(value, "dequantize"):
        value = value.dequantize()  # a quantized weight of torchao
    if not value.untyped_storage().nbytes():
        return f"{value.dtype} {tuple(value.shape)} without memory"  # FSDP2 has freed it
    content = value.contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {_of(content.numpy().tobytes())}"


def _of(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()[:16]
