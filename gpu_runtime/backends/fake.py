"""Models that hold their declared bytes and nothing else: for drills, runbooks and tests.

On a simulated device and on the host the bytes are counted; no page is ever touched, and on a real card nothing is
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..devices.probe import Probe
from ..devices.process_memory import Block
from ..errors import LoadFailed
from ..facts import Evidence, ModelSpec, Shares, where
from .base import Progress

Hook = Callable[[str], Any]


class FakeModel:
    """What `use` yields for a fake: its name, and where it says it lies. Calling it returns what it was called with."""

    def __init__(self, name: str, hook: Hook | None) -> None:
        self.name, self.hook = name, hook
        self.place: tuple[Shares, tuple[Block, ...]] = ((), ())

    def __call__(self, *inputs: Any) -> Any:
        return inputs[0] if len(inputs) == 1 else inputs

    def __repr__(self) -> str:
        return f"<fake {self.name} on {where(self.place[0]) or 'disk'}>"


class FakeBackend:
    """Loads, moves and drops fakes.

    For drills: `origin`, where it is callable, is called with "load" or "move" once the bytes are held and before
    anything else has happened; what it raises makes the step fail. `options={"fails": True}` makes every load fail.
    """

    name = "fake"
    can_move = True
    can_split = True

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def evidence(self, spec: ModelSpec, origin: Any = None) -> Evidence:
        return Evidence(why_unknown="a fake model is as large as it was declared to be")

    def pieces(
        self, spec: ModelSpec, origin: Any = None, model: FakeModel | None = None
    ) -> tuple[int, ...]:
        return ()

    def load(
        self,
        spec: ModelSpec,
        shares: Shares,
        origin: Any = None,
        *,
        progress: Progress | None = None,
        into: Any = None,
    ) -> FakeModel:
        model = (
            into
            if isinstance(into, FakeModel)
            else FakeModel(spec.name, origin if callable(origin) else None)
        )
        total = sum(share.bytes for share in shares)

        def arrive() -> None:
            if model.hook:
                model.hook("load")
            if spec.options.get("fails"):
                raise LoadFailed(
                    f"{spec.name} was told to fail.", name=spec.name, source=spec.source
                )
            for done in (0, total // 2, total) if progress else ():
                progress(done, total)

        self._settle(model, shares, arrive)
        return model

    def value(self, model: FakeModel) -> FakeModel:
        return model

    def move(self, model: FakeModel, shares: Shares) -> None:
        self._settle(model, shares, lambda: model.hook and model.hook("move"))

    def drop(self, model: FakeModel) -> None:
        (_, old), model.place = model.place, ((), ())
        _free(old)

    def measure(self, model: FakeModel) -> Shares:
        return model.place[0]

    def elsewhere(self, model: FakeModel) -> tuple[str, ...]:
        return ()

    def droppable(self, model: FakeModel) -> bool:
        return True

    def unchanged(self, model: FakeModel) -> bool:
        return True

    def _settle(self, model: FakeModel, shares: Shares, arrive: Callable[[], Any]) -> None:
        held: list[Block] = []
        try:
            for share in shares:
                held.append(self.probe.place(share.device).allocate(share.bytes))
            arrive()
            (_, old), model.place = model.place, (shares, tuple(held))
        except (
            BaseException
        ):  # at once, not when the traceback is forgotten: a notebook keeps the last one
            if model.place[0] is not shares:
                _free(held)
            raise
        _free(old)


def _free(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.free()
