"""A model is pinned exactly as long as its `with` block runs, in whatever way the block is entered."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from gpu_runtime import GpuError, Runtime, StillInUse
from gpu_runtime.owner import acquire, pins
from gpu_runtime.units import GIB

from .conftest import fakes, loaded, stopped_at


@pytest.fixture
def rt(runtime: Callable[..., Runtime]) -> Runtime:
    made = loaded(runtime(monitor=False), m="3GiB")
    return made


# -- ways to enter a block, each as (enter, leave); none of them drops its last reference to the block
@contextlib.contextmanager
def wrapped(held: Any) -> Iterator[Any]:
    with held as value:
        yield value


def by_hand(held: Any) -> tuple[Any, Any]:
    return held.__enter__, lambda: held.__exit__(None, None, None)


def of_the_class(held: Any) -> tuple[Any, Any]:
    """Enters and leaves a block through the methods of its class, as PEP 343 defines the `with` statement."""
    kind = type(held)
    return lambda: kind.__enter__(held), lambda: kind.__exit__(held, None, None, None)


def looked_up_before(held: Any) -> tuple[Any, Any]:
    leave = held.__exit__
    return held.__enter__, lambda: leave(None, None, None)


def asked_for_before(held: Any) -> tuple[Any, Any]:
    assert hasattr(held, "__exit__")
    return by_hand(held)


def stacked(held: Any) -> tuple[Any, Any]:
    stack = contextlib.ExitStack()
    return lambda: stack.enter_context(held), stack.close


def pushed(held: Any) -> tuple[Any, Any]:
    stack = contextlib.ExitStack()
    return lambda: (held.__enter__(), stack.push(held.__exit__)), stack.close


def generated(held: Any) -> tuple[Any, Any]:
    return by_hand(wrapped(held))


WAYS = [by_hand, of_the_class, looked_up_before, asked_for_before]
WAYS += [stacked, pushed, generated]
DEEDS = {"use": lambda rt: rt.use("m"), "lease": lambda rt: rt.lease("1GiB", purpose="test")}


def in_use(rt: Runtime) -> int:
    """The number of pins of the model, and of open blocks."""
    session = rt._session
    blocks = [anchor for _, anchor in session.blocks.values() if anchor() is not None]
    return len(session.residents["m"].pins) + len(blocks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("deed", DEEDS)
def test_a_block_is_held_from_its_entry_to_its_exit_in_whatever_way_it_is_entered(rt, deed, way):
    """Entered by hand, the pin lasted until the collection; with `__exit__` looked up first there was none.

    A pin names the thread that entered.
    """
    held, pinned_by = DEEDS[deed](rt), rt._session.residents["m"].pinned_by
    gc.disable()
    try:
        for _ in range(2):
            enter, leave = way(held) if way is not generated else way(DEEDS[deed](rt))
            enter()
            assert in_use(rt) == 1
            assert pinned_by(threading.get_ident()) is (deed == "use")
            assert not pinned_by(threading.get_ident() + 1)
            leave()
            assert in_use(rt) == 0
    finally:
        gc.enable()


def test_blocks_of_one_object_inside_each_other_end_one_by_one(rt):
    held = rt.use("m")
    counts = []
    with held:
        held.__enter__()
        with held:
            counts.append(in_use(rt))
        counts.append(in_use(rt))
        with contextlib.ExitStack() as stack:
            stack.enter_context(held)
            counts.append(in_use(rt))
        counts.append(in_use(rt))
        held.__exit__(None, None, None)
        counts.append(in_use(rt))
    assert [*counts, in_use(rt)] == [3, 2, 3, 2, 1, 0]


def test_an_exit_without_an_entry_ends_no_other_block(rt):
    held = rt.use("m")
    spare = held.__exit__
    with held:
        spare(None, None, None)
        held.__exit__(None, None, None)
        assert in_use(rt) == 1
        with pytest.raises(StillInUse):
            rt.evict("m")
    assert in_use(rt) == 0


def test_an_object_that_was_entered_by_hand_and_dropped_holds_nothing(rt):
    held = rt.use("m")
    held.__enter__()
    assert in_use(rt) == 1
    gc.disable()
    try:
        del held
        assert in_use(rt) == 0, "a cycle would keep the model until a collection"
    finally:
        gc.enable()


def test_a_failed_entry_by_hand_holds_nothing(rt, monkeypatch):
    held = rt.use("m")
    monkeypatch.setattr(rt._session, "dozing", True)
    monkeypatch.setattr(rt._session, "wake_monitor", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        held.__enter__()
    assert in_use(rt) == 0


def test_a_block_entered_without_waiting_is_held_until_its_exit(rt):
    """The exit may be called by another thread."""
    held = rt.use("m")
    for count in (1, 2):
        assert held.enter_if_here() == (rt._session.residents["m"].value,)
        assert in_use(rt) == count
    for count in (1, 0):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(held.__exit__, None, None, None).result()
        assert in_use(rt) == count


@pytest.mark.parametrize("deed", DEEDS)
def test_a_block_that_must_wait_is_not_entered(rt, deed):
    """Neither memory is requested nor a model loaded."""
    rt.evict("m")
    book = rt._session.ledger.read()
    assert DEEDS[deed](rt).enter_if_here() == ()
    assert (in_use(rt), rt.here("m")) == (0, False)
    assert rt._session.ledger.read() == book


# -- the stop button
def plain(rt: Runtime) -> None:
    with rt.use("m"):
        pass


def kept_in_a_variable(rt: Runtime) -> None:
    held = rt.use("m")
    with held:
        pass
    with held, held:
        pass


def with_an_error(rt: Runtime) -> None:
    with contextlib.suppress(KeyError), rt.use("m"):
        raise KeyError


WATCHED = {
    *(way.__code__ for way in (plain, kept_in_a_variable, with_an_error)),
    *(getattr(acquire.Use, name).__code__ for name in ("__init__", "_start", "_finish")),
}


def watched(frame: FrameType) -> bool:
    """Whether the frame is of the block or of `pins.py`."""
    return frame.f_code in WATCHED or frame.f_globals is vars(pins)


@pytest.fixture
def own_thread() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Calls in a thread of its own: CPython 3.11 may keep the interrupt as the context of later errors."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda act: pool.submit(act).result()


@pytest.mark.parametrize("act", [plain, kept_in_a_variable, with_an_error])
def test_an_interrupt_at_any_instruction_of_a_with_block_leaves_no_pin(rt, act, own_thread):
    """No pin is left even while the notebook keeps the error with all its frames."""

    def stop_everywhere() -> None:
        instruction = 0
        while kept := stopped_at(instruction := instruction + 1, lambda: act(rt), watched):
            assert in_use(rt) == 0, f"instruction {instruction}"
            assert kept.__traceback__
        assert instruction > 60

    gc.disable()
    try:
        own_thread(stop_everywhere)
    finally:
        gc.enable()
    assert rt.evict("m").done


@pytest.mark.parametrize("way", [by_hand, stacked, generated])
def test_an_interrupt_of_a_wrapped_block_leaves_a_pin_at_most_as_long_as_its_frames(
    rt, way, own_thread
):
    """If `__exit__` is never called, the pin ends with the error's frames. None of our code runs before that."""

    def act() -> None:
        enter, leave = way(rt.use("m"))
        enter()
        leave()

    def stop_everywhere() -> None:
        instruction = 0
        while kept := stopped_at(instruction := instruction + 1, act, watched):
            del kept
            gc.collect()
            assert in_use(rt) == 0, f"instruction {instruction}"
        assert instruction > 20

    own_thread(stop_everywhere)


# -- after an error
def _refuse(rt: Runtime) -> None:
    rt.preload("huge")


def _wait_in_vain(rt: Runtime) -> None:
    with rt.use("m"):
        rt.preload("other", timeout=0.0)


def _evict_a_used_model(rt: Runtime) -> None:
    with rt.use("m"):
        rt.evict("m", timeout=0.0)


def _fail_to_load(rt: Runtime) -> None:
    rt.preload("damaged")


def _run_out_while_loading(rt: Runtime) -> None:
    rt.probe.place("sim:0").squeeze(23 * GIB)
    rt.preload("small")


def _run_out_in_a_block(rt: Runtime) -> None:
    with rt.use("m"):
        raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def _fail_to_move(rt: Runtime) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a copy failed")

    backend = rt._session.residents["m"].backend
    backend.move = fail
    rt.evict("m")


def _move_away(rt: Runtime) -> None:
    rt.move("m", "host")


FAILURES = (
    _refuse, _wait_in_vain, _evict_a_used_model, _fail_to_load, _run_out_while_loading, _run_out_in_a_block,
    _fail_to_move, _move_away,
)  # fmt: skip


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__.strip("_"))
def test_an_error_keeps_nothing_of_the_users_once_it_was_handled(rt, fail):
    """In a cycle, the error's frames would keep the user's tensors on the card until a garbage collection."""
    fakes(rt, other="23GiB", huge="100GiB", small="4GiB")
    rt.register("damaged", backend="fake", size="1GiB", fails=True)
    kept = []

    def cell() -> None:
        tensor = Users()
        kept.append(weakref.ref(tensor))
        fail(rt)

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(GpuError, MemoryError, RuntimeError):
            cell()
            pytest.fail("it must raise")
        assert kept[0]() is None
    finally:
        gc.enable()


class Users:
    """Stands for a tensor of the user's."""
