"""Finds the other users of a CPU storage's memory: a file, another process, NumPy, or none.

`storage.resizable()` is false for all memory that torch did not allocate, and for ever after one
call of `Tensor.numpy()`. It does not tell whether a NumPy array still exists. So this module reads
which of torch's functions will free the memory, and counts the references to the tensors. NumPy's
arrays are invisible to the garbage collector, but each one holds a reference to its tensor.

What is not understood counts as used by somebody else.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOREIGN = "NumPy, DLPack, a file or another library uses the same memory"
ARRAY = "a NumPy array, or another library, uses the same memory"
SHARED = "other processes share its memory (share_memory_, or a file that is written)"
FEW = 32  # for so few tensors, a search for their holders is faster than a count of all references
_WORDS = 8  # of a storage's C++ object that are read; the object is larger

Known = dict[int, tuple[frozenset[tuple[int, int]], bool]]  # results of `used_elsewhere`


class _Layout(NamedTuple):
    """Where a storage's C++ object has its address, and the functions that free its memory."""

    place: int  # the word with the address; the freeing function and its argument follow
    torch: int  # frees memory that torch allocated
    file: int  # ends the mapping of a file
    slice: int  # releases the storage of which this one is a slice


def of_torch(storage: torch.UntypedStorage) -> str:
    """Returns "torch" for memory that torch allocated on the CPU, and "file" for a file it mapped.

    A slice of another storage is what that storage is. The result is empty if torch did not make
    the memory, as for `from_numpy`, or if this version of torch is not understood.
    """
    layout = _layout()
    if layout is None:
        return ""
    key = storage._cdata
    for _ in range(2):  # torch.load makes slices of the file
        _, freed_by, argument = _words(key)[layout.place : layout.place + 3]
        if freed_by != layout.slice:
            break
        key = argument
    return {layout.torch: "torch", layout.file: "file"}.get(freed_by, "")


def _words(key: int) -> list[int]:
    return list((ctypes.c_uint64 * _WORDS).from_address(key))


@functools.cache
def _layout() -> _Layout | None:
    """The layout of a storage, learned from storages whose content is known; None if not understood."""
    own = torch.empty(64, dtype=torch.uint8, device="cpu").untyped_storage()
    part = own[8:16]
    try:
        file = torch.UntypedStorage.from_file(sys.executable, False, 64)
    except (OSError, RuntimeError):  # then nothing is understood, and all of it stays
        return None
    address = own.data_ptr()
    words = _words(own._cdata)
    for place in range(_WORDS - 2):
        if words[place] == address == words[place + 2]:
            break
    else:
        return None
    of_part, of_file = _words(part._cdata), _words(file._cdata)
    is_understood = (
        of_part[place] == part.data_ptr()
        and of_part[place + 2] == own._cdata
        and of_file[place] == file.data_ptr()
        and len({words[place + 1], of_part[place + 1], of_file[place + 1]}) == 3
    )
    if not is_understood:
        return None
    return _Layout(place, words[place + 1], of_file[place + 1], of_part[place + 1])


def only_cut(bare: Sequence[torch.UntypedStorage]) -> set[int]:
    """The keys of those storages in the list `bare` that are files, and have no name in Python.

    If such a file has no tensors, only slices of it use its memory: torch.load and safetensors make
    one for each tensor. The caller must hold no other reference to the storages than the list.
    """
    every = [*bare, _Probe()]
    counts = [sys.getrefcount(one) for one in every]
    most = counts[-1] + 1 + cpp_keeps_python()  # the list `bare`, and C++
    return {
        one._cdata
        for one, count in zip(bare, counts, strict=False)
        if count <= most
        and torch._C._storage_Use_Count(one._cdata) > 1
        and not one.resizable()
        and of_torch(one) == "file"
    }


def private_files() -> list[tuple[int, int]]:
    """The first address, and the one after the last, of each private mapping of a file, if shown."""
    found = []
    try:
        with open("/proc/self/maps") as lines:
            for line in lines:
                span, rights, _, _, inode, *_ = line.split(maxsplit=5)
                if rights.endswith("p") and inode != "0":
                    first, _, end = span.partition("-")
                    found.append((int(first, 16), int(end, 16)))
    except OSError:  # then no mapping counts as private
        return []
    return found


def is_within(address: int, size: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether `size` bytes at `address` are in one of `spans`, or in neighbouring ones."""
    end = address + size
    for first, after in spans:  # sorted, as the system lists them
        if first <= address < after:
            address = after
            if address >= end:
                return True
    return False


def used_elsewhere(
    groups: Sequence[tuple[torch.UntypedStorage, Sequence[Tensor]]], known: Known | None = None
) -> list[bool]:
    """Whether something that Python cannot list refers to a tensor of each storage in `groups`.

    Each group has a storage and all its tensors that were found. `known` has the results of an
    earlier call, and is updated. A result is used again while the tensors and their numbers of
    references are the same. Without it, all references of the process are counted: 0.1 s for
    230,000 objects.
    """
    signs = [frozenset((id(one), sys.getrefcount(one)) for one in group[1]) for group in groups]
    results: dict[int, bool] = {}
    if known is not None:
        for (storage, _), sign in zip(groups, signs, strict=True):
            before = known.get(storage._cdata)
            if before is not None and before[0] == sign:
                results[storage._cdata] = before[1]
    unknown = [group for group in groups if group[0]._cdata not in results]
    if unknown:
        results |= _counted(unknown)
    answers = [results[storage._cdata] for storage, _ in groups]
    if known is not None:
        known.clear()
        for (storage, _), sign, answer in zip(groups, signs, answers, strict=True):
            known[storage._cdata] = (sign, answer)
    return answers


def _counted(groups: Sequence[tuple[torch.UntypedStorage, Sequence[Tensor]]]) -> dict[int, bool]:
    """The result of `used_elsewhere` for each storage, by its key."""
    own: dict[int, dict[int, Tensor]] = {}
    for storage, tensors in groups:
        of_views = [one._base for one in tensors if one._is_view()]
        both = [*tensors, *(one for one in of_views if one is not None)]
        own[storage._cdata] = {id(one): one for one in both}
    hidden = hidden_references(one for tensors in own.values() for one in tensors.values())
    answers = {}
    for storage, _ in groups:
        known = own[storage._cdata]
        # Each tensor holds the storage once, and its Python object once more.
        more = torch._C._storage_Use_Count(storage._cdata) > len(known) + 1
        answers[storage._cdata] = more or any(hidden[key] > 0 for key in known)
    return answers


class _Probe:
    """An object to which only `hidden_references` refers."""


def hidden_references(objects: Iterable[Any]) -> dict[int, int]:
    """For each of `objects`, by its id: the references that Python's garbage collector cannot list.

    NumPy's arrays, C++ objects and functions that run hold them. That of a C++ object to its own
    Python object is left out.
    """
    every = (_Probe(), *{id(one): one for one in objects}.values())
    wanted = {id(one) for one in every}
    holders: Iterable[Any]
    if len(every) <= FEW:
        holders = chain.from_iterable(starmap(gc.get_referrers, (every,)))
    else:
        # The oldest first: a collection in the middle, by another thread, moves objects to an older
        # generation, where they would be counted twice. Those left out here count as hidden.
        generations = reversed(range(len(gc.get_count())))
        holders = chain.from_iterable(map(gc.get_objects, generations))
    held = map(id, chain.from_iterable(map(gc.get_referents, holders)))
    # One call into C, so that no other thread changes the objects meanwhile. Before and after it, a
    # thread can drop a reference that is seen. The larger number of references is the safe one.
    collects = gc.isenabled()
    try:
        gc.disable()
        before = [*map(sys.getrefcount, every)]
        seen = Counter(list(filter(wanted.__contains__, held)))
        after = [*map(sys.getrefcount, every)]
    finally:
        if collects:
            gc.enable()
    hidden = {
        id(one): max(counts) - seen[id(one)] - _from_cpp(one)
        for one, *counts in zip(every, before, after, strict=True)
    }
    usual = hidden[id(every[0])]  # the references of this function's variables
    return {key: count - usual for key, count in hidden.items()}


def _from_cpp(one: Any) -> int:
    """The references to the Python object of `one` that its own C++ object holds."""
    uses = 0
    if isinstance(one, Tensor):
        uses = one._use_count()
    elif type(one) is torch.UntypedStorage:
        uses = torch._C._storage_Use_Count(one._cdata)
    return 1 if uses > 1 and cpp_keeps_python() else 0


@functools.cache
def cpp_keeps_python() -> bool:
    """Whether torch counts a C++ reference as a reference to the Python object (since 2.10)."""
    leaf = torch.ones(1, requires_grad=True, device="cpu")
    before = sys.getrefcount(leaf)
    with torch.enable_grad():
        result = leaf * 2
    return sys.getrefcount(leaf) > before and result is not None
