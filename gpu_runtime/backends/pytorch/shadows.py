"""Shadows of models on a card. A shadow is a copy in host memory of the unchanged bytes of a
storage.

If the digest of a storage equals the digest of its shadow, the storage leaves its card without a
copy: the shadow becomes its bytes. The digest of a shadow is only valid while nothing has written
the shadow's bytes.
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
    """The shadows of the storages in `going` that move to the host unchanged, by their index in
    `going`.

    If a storage has changed, its shadow is freed, because the shadow's place is needed.
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
    """The new bytes of each of `sources`: the shadow of the source, or else a copy; see
    `storages.copied`.
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
    """The shadows that stay on the host when the storages `going` move to cards, by the key of the
    storage.

    `sources` are the bytes of these storages now, and `targets` the copies on the cards. The second
    phase of the move exchanges `sources` with `targets`.
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
    """The digests of storages that are still valid after the move.

    If a storage is copied to the host, its digest is left out.

    The reason is that such a digest describes other bytes than the new copy. `unchanged` is the
    result of `ready`.
    """
    copied = set()
    for index, memory in enumerate(places):
        if memory.device == HOST and index not in unchanged:
            copied.add(going[index].storage._cdata)
    return {storage: it for storage, it in model.digests.items() if storage not in copied}
