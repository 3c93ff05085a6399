"""Whether the torch of this process can move memory. torch is not imported for the answer."""

from __future__ import annotations

import functools
import re
import sys
from importlib import metadata

from ..version import OLDEST_TORCH, TORCH_WITH_EXCHANGE


def why_torch_moves_nothing() -> str | None:
    """Why nothing of this process is parked or moved; empty if torch can move it, or is not here.

    More is known once torch is imported, and once the process uses a card. None means that torch can
    move it, and that this will not change.
    """
    torch = sys.modules.get("torch")
    is_imported = hasattr(torch, "UntypedStorage")
    version = str(torch.__version__) if is_imported else _installed()
    if not version or _numbers(version) >= _numbers(TORCH_WITH_EXCHANGE):
        return None if is_imported else ""
    if _numbers(version) < _numbers(OLDEST_TORCH):
        return f"torch {version} is older than {OLDEST_TORCH}"
    if not is_imported:
        return ""
    from .pytorch import swap

    return swap.why_not([torch.device("cuda")] if torch.cuda.is_initialized() else [])


@functools.cache
def _installed() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:  # torch is not installed, so nothing is to be moved
        return ""


@functools.cache  # each cell asks
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
