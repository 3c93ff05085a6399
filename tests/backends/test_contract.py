"""The contract that every backend fulfils, for every kind of model."""

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gpu_runtime.backends.base import Backend, is_out_of_memory
from gpu_runtime.backends.engines.backend import Server
from gpu_runtime.backends.llama_cpp.backend import LlamaEngine
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices.probe import Probe
from gpu_runtime.errors import BadCall, CannotGovern, NotResident
from gpu_runtime.facts import ModelSpec, Share, Shares, beside
from gpu_runtime.units import MIB
from tests.clock import PATIENCE
from tests.worlds import footprint


class Case(NamedTuple):
    """A backend, a model for it, and a way to make its next load or move fail half-way."""

    backend: Backend
    probe: Probe
    spec: ModelSpec
    origin: Any
    trip: Callable[[BaseException | None], None]  # sets the error of the next step
    run: Callable[[Any], Any]  # the model's answer to a fixed input
    # relative error allowed for the estimate; engines choose their own work space
    rough: float = 0.02

    def on(self, device: str) -> Shares:
        return (Share(device, self.need),)

    @property
    def need(self) -> int:
        return footprint(self.backend, self.spec, self.origin).bytes

    def load(self, device: str = "sim:0", **more: Any) -> Any:
        return self.backend.load(self.spec, self.on(device), self.origin, **more)


def network() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(256, 256), nn.Linear(256, 256)
    last.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(256), nn.ReLU(), last).eval()


MOVING = ["fake", "torch", "transformers"]
SLEEPING = ["llama_cpp", "llama_cpp in process"]


@pytest.fixture(params=[*MOVING, *SLEEPING, "llama-server"])
def case(request, probe, llama, tiny_gguf) -> Case:
    """A case for each backend."""
    return _case(request, request.param, probe, llama, tiny_gguf)


@pytest.fixture(params=MOVING)
def mover(request, probe, llama, tiny_gguf) -> Case:
    """A case for each backend that can move a model from one memory to another."""
    return _case(request, request.param, probe, llama, tiny_gguf)


@pytest.fixture(params=SLEEPING)
def sleeper(request, probe, llama, tiny_gguf) -> Case:
    """A case for each backend whose engines sleep here."""
    return _case(request, request.param, probe, llama, tiny_gguf)


def _case(request, kind, probe, llama, tiny_gguf) -> Case:
    name, _, how = kind.partition(" ")
    backend = open_backend(name, probe)
    pending: list[BaseException | None] = [None]

    def trip(error: BaseException | None) -> None:
        pending[0] = error

    def step(*_: Any) -> None:
        error, pending[0] = pending[0], None
        if error is not None:
            raise error

    if name == "fake":
        spec = ModelSpec("drill", "fake", size=3 * MIB)
        return Case(backend, probe, spec, step, trip, lambda model: model(7))
    monkeypatch = request.getfixturevalue("monkeypatch")
    if name == "llama_cpp":
        pytest.importorskip(
            "llama_cpp",
            reason="llama-cpp-python is not installed: pip install 'gpu-console[llama]'",
        )
        ask = LlamaEngine.load
        monkeypatch.setattr(LlamaEngine, "load", lambda *a: (ask(*a), step())[0])
        spec = ModelSpec("tiny", "llama_cpp", source=str(tiny_gguf), options={"isolated": not how})
        return Case(backend, probe, spec, None, trip, _greedy, rough=0.12)
    if name == "llama-server":
        pytest.importorskip("sse_starlette", reason="llama-cpp-python[server] is not installed")
        start = Server.start
        monkeypatch.setattr(Server, "start", lambda self: (start(self), step())[0])
        spec = ModelSpec("tiny", "llama-server", source=str(tiny_gguf))
        return Case(backend, probe, spec, None, trip, _over_http)
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a, **k: (copy(*a, **k), step())[0])
    if name == "torch":
        x = torch.linspace(-1, 1, 512).view(2, 256)
        return Case(backend, probe, ModelSpec("net", "torch"), network, trip, lambda net: net(x))
    spec = ModelSpec("llama", "transformers", source=str(llama))
    ids = torch.tensor([[5, 6, 7]])
    return Case(backend, probe, spec, None, trip, lambda module: module(ids).logits)


def _greedy(model: Any) -> str:
    return model.create_completion("the quick brown", max_tokens=8, temperature=0)["choices"][0][
        "text"
    ]


def _over_http(served: Any) -> str:
    body = json.dumps(
        {"model": served.model, "prompt": "the quick brown", "max_tokens": 8, "temperature": 0}
    ).encode()
    headers = {"Content-Type": "application/json", **served.headers}
    request = urllib.request.Request(f"{served.base_url}/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=PATIENCE))["choices"][0]["text"]


def answer(case: Case, model: Any) -> Any:
    with torch.no_grad():
        return case.run(case.backend.value(model))


def held(case: Case, model: Any) -> Shares:
    """The bytes on each device: the model's own, and those that are lost when it leaves."""
    return beside(case.backend.measure(model), case.backend.working_bytes(model) or 0)


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


NOTHING = {"sim:0": 0, "sim:1": 0, "host": 0}


def test_a_load_holds_its_measured_bytes_and_a_drop_or_the_end_of_the_last_reference_frees_them(
    case,
):
    """A second drop does nothing."""
    case.load()
    assert case.probe.used() == NOTHING
    model = case.load()
    (share,) = held(case, model)
    assert share.device == "sim:0" and case.probe.used() == NOTHING | {"sim:0": share.bytes}
    assert abs(share.bytes - case.need) <= case.rough * case.need
    before = answer(case, model)
    assert before is not None
    if case.spec.backend not in MOVING:  # it goes to no other card
        with pytest.raises(CannotGovern, match="places a model when it loads it"):
            case.backend.move(model, case.on("sim:1"))
        assert case.probe.used() == NOTHING | {"sim:0": share.bytes}
        assert answer(case, model) == before
    for _ in range(2):
        case.backend.drop(model)
        assert case.probe.used() == NOTHING
        assert case.backend.measure(model) == ()


def test_load_offload_restore_and_drop_free_every_byte(mover):
    """After each step, also one to its own device, the measured bytes are the model's, on one device only."""
    case = mover
    model = case.load()
    (share,) = case.backend.measure(model)
    before = answer(case, model)
    for device in ("sim:0", "host", "sim:0", "sim:1", "host", "sim:1"):
        case.backend.move(model, case.on(device))
        assert case.backend.measure(model) == (Share(device, share.bytes),)
        assert case.probe.used() == NOTHING | {device: share.bytes}
        assert same(answer(case, model), before)
    case.backend.drop(model)
    assert case.probe.used() == NOTHING
    assert case.backend.measure(model) == ()


@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_from_ram_it_moves_on_to_a_disk_holds_nothing_and_returns_to_any_card(
    request, probe, llama, tiny_gguf, tmp_path, kind
):
    """Its bytes count as host memory's for the backend; that they are on the disk is the owner's knowledge."""
    case = _case(request, kind, probe, llama, tiny_gguf)
    model = case.load()
    (share,), value, before = (
        case.backend.measure(model),
        case.backend.value(model),
        answer(case, model),
    )
    for device in ("sim:1", "sim:0"):
        case.backend.move(model, case.on("host"))
        assert case.backend.stows(model)
        case.backend.move_on(model, case.backend.write(model, tmp_path))
        assert model.disk_bytes == share.bytes and case.probe.used() == NOTHING
        assert case.backend.measure(model) == (Share("host", share.bytes),)
        assert not os.listdir(tmp_path)
        case.backend.move(model, case.on(device))
        assert model.disk_bytes == 0 and case.probe.used() == NOTHING | {device: share.bytes}
        assert case.backend.value(model) is value and same(answer(case, model), before)
    case.backend.move(model, case.on("host"))
    case.backend.move_on(model, case.backend.write(model, tmp_path))
    assert case.backend.droppable(model) == case.backend.unchanged(model) == (kind != "torch")
    case.backend.drop(model)
    again = case.load(into=value)
    assert same(answer(case, again), before)


def test_asleep_it_holds_nothing_on_its_card_and_awake_it_answers_as_before(sleeper):
    """The worker stays, and host memory has what it keeps. It wakes on its own card, as the object that users have."""
    case = sleeper
    model = case.load()
    (share,), value, pids = case.backend.measure(model), case.backend.value(model), model.pids
    before, claimed = answer(case, model), case.probe.used()["sim:0"]
    for _ in range(2):
        case.backend.move(model, (Share("host", share.bytes),))
        assert case.backend.measure(model) == (Share("host", share.bytes),)
        assert case.probe.used() == NOTHING | {"host": share.bytes}
        with pytest.raises(NotResident):
            answer(case, model)
        with pytest.raises(BadCall):  # the worker itself has no model
            model.engine.ask("n_ctx", (), {})
        assert case.backend.must_return_to(model) == {"sim:0": claimed}
        with pytest.raises(CannotGovern):
            case.backend.move(model, case.on("sim:1"))
        case.backend.move(model, (Share("sim:0", claimed),))
        assert case.probe.used() == NOTHING | {"sim:0": claimed}
        assert (case.backend.value(model), model.pids) == (value, pids)
        assert answer(case, model) == before
    case.backend.move(model, (Share("host", share.bytes),))
    case.backend.drop(model)
    assert case.probe.used() == NOTHING and case.backend.measure(model) == ()


def test_a_reload_fills_the_object_that_users_kept(case):
    """References that users kept from an earlier load stay valid."""
    model = case.load()
    kept, before = case.backend.value(model), answer(case, model)
    case.backend.drop(model)
    again = case.load("sim:1", into=kept)
    assert case.backend.value(again) is kept
    assert same(answer(case, again), before)
    case.backend.drop(again)
    if case.spec.backend == "torch":
        del kept  # it has no source: the user's reference is all that keeps its weights
    assert case.probe.used() == NOTHING


FAILURES = [OSError("the disk went away"), KeyboardInterrupt(), MemoryError()]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: type(f).__name__)
def test_a_load_that_fails_in_the_middle_frees_everything(case, failure):
    """A notebook keeps its last traceback, which refers to the load's frames."""
    case.trip(failure)
    with pytest.raises(type(failure)) as held:
        case.load()
    assert case.probe.used() == NOTHING
    assert held.value is failure
    case.backend.drop(case.load())


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: type(f).__name__)
def test_a_move_that_fails_in_the_middle_changes_nothing(mover, failure):
    case = mover
    model = case.load()
    before, held = answer(case, model), case.probe.used()
    case.trip(failure)
    with pytest.raises(type(failure)) as kept:
        case.backend.move(model, case.on("host"))
    assert case.probe.used() == held
    assert case.backend.measure(model)[0].device == "sim:0"
    assert same(answer(case, model), before)
    assert kept.value is failure


@pytest.mark.parametrize("at", [0, 1])
def test_the_stop_button_during_a_load_frees_everything(case, at):
    """The progress callback raises KeyboardInterrupt at the start or at the end of the load."""
    calls = []

    def progress(done, total):
        calls.append((done, total))
        if done >= at * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        case.load(progress=progress)
    assert case.probe.used() == NOTHING and held
    assert calls[0][0] == 0


def test_progress_runs_from_zero_to_the_total(case):
    calls = []
    model = case.load(progress=lambda done, total: calls.append((done, total)))
    total = held(case, model)[0].bytes
    if case.rough > 0.02:  # an engine reports the total before it can be measured
        assert calls[0][1] == pytest.approx(total, rel=case.rough)
        total = calls[0][1]
    assert calls[0] == (0, total) and calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_out_of_memory_in_a_load_is_recognised_and_frees_everything(case):
    case.probe.place("sim:0").fail_next()
    with pytest.raises(Exception) as error:
        case.load()
    assert is_out_of_memory(error.value)
    assert isinstance(error.value, torch.OutOfMemoryError)
    assert case.probe.used() == NOTHING


def test_out_of_memory_in_a_move_changes_nothing(mover):
    case = mover
    model = case.load()
    case.probe.place("host").squeeze(64 * MIB)
    with pytest.raises(Exception) as error:
        case.backend.move(model, case.on("host"))
    assert is_out_of_memory(error.value)
    assert case.backend.measure(model)[0].device == "sim:0"


def test_a_card_of_exactly_the_measured_size_is_enough(case):
    """The bytes that the allocator adds by rounding do not count."""
    model = case.load()
    exactly = held(case, model)[0].bytes
    case.backend.drop(model)
    case.probe.place("sim:0").squeeze(64 * MIB - exactly)
    case.backend.drop(case.load())
    case.probe.place("sim:0").squeeze(64 * MIB - exactly + 1)
    with pytest.raises(Exception) as error:
        case.load()
    assert is_out_of_memory(error.value)


def test_over_several_devices_bytes_follow_the_shares_and_answers_are_equal(case):
    """It is divided between its pieces, or at any byte without pieces. Answers are equal to the bit."""
    model = case.load()
    before = answer(case, model)
    pieces = case.backend.pieces(case.spec, case.origin, model)
    assert not pieces or sum(pieces) == held(case, model)[0].bytes
    first = pieces[0] if pieces else case.need // 3
    shares = (Share("sim:1", first), Share("sim:0", case.need - first))
    if case.spec.backend in MOVING:
        case.backend.move(model, shares)
        assert case.backend.measure(model)[0] == shares[0]
    else:
        case.backend.drop(model)
        model = case.backend.load(case.spec, shares, case.origin)
        first_part = held(case, model)[0].bytes / sum(one.bytes for one in held(case, model))
        assert first_part == pytest.approx(first / case.need, abs=0.01)
    sizes = {share.device: share.bytes for share in held(case, model)}
    assert sizes | {"host": 0} == case.probe.used()
    assert same(answer(case, model), before) and case.backend.elsewhere(model) == ()
    if case.spec.backend in MOVING:
        case.backend.move(model, case.on("host"))
        assert same(answer(case, model), before)
    case.backend.drop(model)
    assert case.probe.used() == NOTHING
    again = case.backend.load(case.spec, shares, case.origin)
    assert [share.device for share in case.backend.measure(again)] == ["sim:1", "sim:0"]
    assert same(answer(case, again), before)


def test_the_registry_imports_no_framework():
    """torch and transformers are imported only when a backend that needs them is opened."""
    import subprocess

    code = (
        "import sys, gpu_runtime.backends.registry as b, gpu_runtime.devices.probe as p;"
        "b.open_backend('fake', p.open_probe('sim:1GiB'));"
        "assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys(), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
