"""Shadows of models on a card. A shadow is a copy of a storage's bytes in host memory.

When a storage with a shadow leaves its card, its bytes are compared with the digest of the loaded
bytes. If they are equal, nothing is copied: the shadow becomes the storage's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...devices.process_memory import Memory
from ...facts import HOST
from ..base import is_out_of_memory
from . import storages as st
from . import swap
from .fingerprint import digest
from .torch_model import TorchModel


def ready(
    model: TorchModel, going: Sequence[st.Group], places: Sequence[Memory]
) -> dict[int, Tensor]:
    """The shadows of those storages in `going` that move to the host unchanged, by index.

    `places` has the target of each storage. If a storage has changed, its shadow is freed, to make
    room in host memory for the new bytes.
    """
    found: dict[int, Tensor] = {}
    leaving = [i for i, memory in enumerate(places) if memory.device == HOST]
    if any(going[i].storage._cdata in model.shadow for i in leaving):
        st.synchronise({going[i].storage.device for i in leaving})
    for i in leaving:
        storage = going[i].storage._cdata
        shadow = model.shadow.get(storage)
        if shadow is None:
            continue
        if _unchanged(model, going[i], shadow):
            found[i] = shadow
        else:
            model.shadow = {key: it for key, it in model.shadow.items() if key != storage}
    return found


def _unchanged(model: TorchModel, group: st.Group, shadow: Tensor) -> bool:
    known = model.digests.get(group.storage._cdata)
    if known is None or shadow.nbytes != group.nbytes or group.storage._cdata in model.away:
        return False
    try:
        return torch.equal(digest(group.bytes), known)
    except Exception as error:
        if is_out_of_memory(error):  # without room for the digest, the storage is copied
            return False
        raise


def copied(
    shadows: dict[int, Tensor], sources: list[Tensor], places: Sequence[Memory], host: Memory
) -> list[Tensor]:
    """The new bytes of each of `sources`: its shadow if `ready` found one, else a new copy.

    The other parameters are as in `storages.copied`.
    """
    rest = [i for i in range(len(sources)) if i not in shadows]
    copies = st.copied([sources[i] for i in rest], [places[i] for i in rest], host)
    made = {**shadows, **dict(zip(rest, copies, strict=True))}
    copies.clear()
    return [made.pop(i) for i in range(len(places))]


def staying(
    model: TorchModel,
    going: Sequence[st.Group],
    places: Sequence[Memory],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> dict[int, Tensor]:
    """The shadows that remain when the storages `going` move from the host to cards.

    `sources` are the present bytes of these storages, and `targets` the copies on the cards. The
    result maps each storage's `_cdata` after the second phase to its shadow. Usually the shadow is
    the source. But if the second phase swaps the data pointers of source and target, the target has
    the bytes in host memory, and is the shadow.
    """
    found: dict[int, Tensor] = {}
    for group, memory, source, target in zip(going, places, sources, targets, strict=True):
        storage = group.storage._cdata
        before = model.own.get(storage)
        if memory.device == HOST or before is None or before.device != HOST:
            continue
        content = target.untyped_storage()
        if not (swap.can_swap() and group.storage.device == content.device):
            found[content._cdata] = source  # the tensors are bound to the storage of the copy
        elif storage in model.away:
            found[storage] = source
        else:  # the two storages exchange their bytes
            found[storage] = target
    return found


def without(model: TorchModel, going: Sequence[st.Group]) -> dict[int, Tensor]:
    """The shadows of the storages of `model` that are not in `going`."""
    moved = {group.storage._cdata for group in going}
    return {storage: it for storage, it in model.shadow.items() if storage not in moved}


def digests(
    model: TorchModel,
    going: Sequence[st.Group],
    places: Sequence[Memory],
    unchanged: Mapping[int, Tensor],
) -> dict[int, Tensor]:
    """The digests of the storages of `model` that are still valid after a move.

    The digest of a storage that is copied to the host is left out: its bytes may have changed since
    the load. `unchanged` is the result of `ready`.
    """
    copied = set()
    for index, memory in enumerate(places):
        if memory.device == HOST and index not in unchanged:
            copied.add(going[index].storage._cdata)
    return {storage: it for storage, it in model.digests.items() if storage not in copied}
