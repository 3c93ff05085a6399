"""Fake models for drills, runbooks and tests. They claim their declared bytes and have no weights.

On a simulated device and on the host, the bytes are counted, but no memory page is used. On a real
card nothing is allocated.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ..devices.probe import Probe
from ..devices.process_memory import Block
from ..errors import LoadFailed, OutOfMemory
from ..facts import HOST, Evidence, ModelSpec, Shares, where
from ..units import GIB
from .base import Backend, Progress

Hook = Callable[[str], Any]
LARGE_BYTES = 32 * GIB  # from this size on, a fake model has pieces, as a large model has layers
PIECES = 40


class FakeModel:
    """The object that `use` yields for a fake model. A call returns the argument or arguments."""

    def __init__(self, name: str, hook: Hook | None) -> None:
        """`hook` is called with "load" during a load, and with "move" during a move."""
        self.name, self.hook = name, hook
        self.place: tuple[Shares, tuple[Block, ...]] = ((), ())
        self.pieces = 0  # number of equal pieces that can leave a card one by one; 0: none
        self.shadow: tuple[Block, ...] = ()  # its copy in host memory, while it is on a card

    @property
    def shadow_bytes(self) -> int:
        """The bytes of the model's copy in host memory, while the model is on a card."""
        return sum(block.size for block in self.shadow)

    def __call__(self, *inputs: Any) -> Any:
        return inputs[0] if len(inputs) == 1 else inputs

    def __repr__(self) -> str:
        return f"<fake {self.name} on {where(self.place[0]) or 'disk'}>"


class FakeBackend(Backend):
    """Loads, moves and drops fake models.

    For drills, the `origin` of a load may be a callable. Each load calls it with "load", and each
    move with "move", right after the new bytes are claimed. If it raises an error, the load or move
    fails with that error.

    `options={"fails": True}` makes every load fail. With `options={"shadow": True}`, a copy of the
    model stays in host memory, as for a model from disk (`GPU_SHADOWS`). With `options={"pieces":
    40}`, the model has 40 equal pieces. Some of them can leave a card while the others stay. A
    model of 32 GiB or more has 40 pieces by default.
    """

    name = "fake"

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        return Evidence(why_unknown="a fake model has only the size that it declares")

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
        shadow: bool = False,
    ) -> FakeModel:
        """The fake model of `spec`, which holds the bytes of `shares`.

        The model of an earlier load keeps its hook. With `shadow`, a copy stays in host memory if
        it fits there. Raises the errors of a callable `origin`, LoadFailed and OutOfMemory.
        """
        if isinstance(into, FakeModel):
            model = into
        else:
            model = FakeModel(spec.name, origin if callable(origin) else None)
        total = sum(share.bytes for share in shares)
        model.pieces = spec.options.get("pieces", PIECES if total >= LARGE_BYTES else 0)

        def arrive() -> None:
            if model.hook:
                model.hook("load")
            if spec.options.get("fails"):
                raise LoadFailed(
                    f"{spec.name} fails to load because its options say so (fails=True).",
                    name=spec.name,
                    source=spec.source,
                )
            if progress:
                for done in (0, total // 2, total):
                    progress(done, total)

        self._hold(model, shares, 0, arrive)
        if shadow:
            with contextlib.suppress(OutOfMemory):  # the host is full: then there is no copy
                model.shadow = (self.probe.place(HOST).allocate(total),)
        return model

    def piece_bytes(self, model: FakeModel) -> int:
        """Bytes of one piece of `model`; 0 if the model has no pieces or is on several cards."""
        cards = {share.device for share in model.place[0]} - {HOST}
        if not model.pieces or len(cards) > 1:
            return 0
        return -(-sum(share.bytes for share in model.place[0]) // model.pieces)

    def move(self, model: FakeModel, shares: Shares, shadow: bool = False) -> None:
        """Allocates what `shares` lack, calls the hook of `model` with "move", then frees the rest.

        On a move from the host to a card, `shadow` keeps the bytes on the host as a copy.
        """
        copy = _copy_after(model, shares, shadow)
        self._hold(model, shares, copy, lambda: model.hook and model.hook("move"))

    def _hold(self, model: FakeModel, shares: Shares, copy: int, arrive: Callable[[], Any]) -> None:
        """Makes `model` hold `shares`, and `copy` bytes of a copy in host memory.

        Only the bytes that are missing on a device are allocated before `arrive` is called. It calls
        the hook and reports the progress. If it raises an error, nothing changes.
        """
        goal = [(share.device, share.bytes) for share in shares] + [(HOST, copy)] * bool(copy)
        missing = Counter[str]()
        for device, size in goal:
            missing[device] += size
        missing -= _sizes((*model.place[1], *model.shadow))
        more: list[Block] = []
        try:
            for device, size in missing.items():
                more.append(self.probe.place(device).allocate(size))
            arrive()
            have, kept = [*model.place[1], *model.shadow, *more], list[Block | None]()
            for wanted in goal:
                same = (block for block in have if (block.memory.device, block.size) == wanted)
                if (block := next(same, None)) is not None:
                    have.remove(block)
                kept.append(block)
            # `force` ignores the capacity. This is safe, because the new blocks have no more bytes
            # than the blocks that are freed here.
            _free(have)
            made = tuple(
                block or self.probe.place(device).allocate(size, force=True)
                for block, (device, size) in zip(kept, goal, strict=True)
            )
            model.place, model.shadow = (shares, made[: len(shares)]), made[len(shares) :]
        except BaseException:
            # A notebook keeps its last traceback, and with it this frame. So free the blocks now.
            if model.place[0] is not shares:
                _free(more)
            raise

    def keeps_shadow(self, spec: ModelSpec) -> bool:
        """Whether the options of `spec` require a copy of the model in host memory."""
        return bool(spec.options.get("shadow"))

    def free_shadow(self, model: FakeModel) -> None:
        shadow, model.shadow = model.shadow, ()
        _free(shadow)

    def drop(self, model: FakeModel) -> None:
        (_, old), model.place = model.place, ((), ())
        _free(old)
        self.free_shadow(model)

    def measure(self, model: FakeModel) -> Shares:
        return model.place[0]

    def droppable(self, model: FakeModel) -> bool:
        """Always True, because a fake `model` has no weights."""
        return True


def _copy_after(model: FakeModel, shares: Shares, keep: bool) -> int:
    """The bytes of the copy in host memory after `model` has moved to `shares`.

    With `keep`, pieces that return to the card leave their bytes in host memory as a copy. If the
    copy has all bytes of the card, a piece that goes to the host uses its part of the copy. If all
    pieces go to the host, no copy is left.
    """
    before, copy = _sizes(model.place[1]), model.shadow_bytes
    going = sum([share.bytes for share in shares if share.device == HOST]) - before[HOST]
    if going < 0:
        return copy - going if keep else copy
    on_card = sum(before.values()) - before[HOST]
    if copy >= on_card or going >= on_card:
        return max(0, copy - going) if going < on_card else 0
    return copy


def _sizes(blocks: Iterable[Block]) -> Counter[str]:
    sizes = Counter[str]()
    for block in blocks:
        sizes[block.memory.device] += block.size
    return sizes


def _free(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.free()
