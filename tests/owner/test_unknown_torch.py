"""Where our exchange does not know the torch, models are counted and leased, and each refusal says why."""

import pytest
import torch

from gpu_runtime import CannotGovern, DoesNotFit, GpuError
from gpu_runtime.backends.pytorch import old_torch

from .conftest import claims, fakes, where
from .kernels import keep

WHY = "gpu-console does not know how torch 2.9.9 keeps the memory of tensors"


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    monkeypatch.setattr(torch.UntypedStorage, "_swap_data_ptr_", None, raising=False)
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.9"))
    monkeypatch.setattr(old_torch, "exchanged_fields", lambda: None)


@pytest.fixture
def rt(runtime):
    return runtime(devices="sim:16MiB,host:1GiB")


def linear(size: int) -> torch.nn.Module:
    return torch.nn.Linear(1024, size, bias=False).eval()


def test_a_model_that_cannot_move_is_used_and_neither_evicted_nor_a_victim(rt):
    for name, size in {"made": 1024, "other": 2048, "late": 1024}.items():
        rt.register(name, lambda size=size: linear(size))
    with rt.use("made") as module:
        view = module.weight.detach()
    rt.preload("other")
    with pytest.raises(CannotGovern, match=f"(?s)made stays where it is: {WHY}.*'torch>=2.12'"):
        rt.evict("made")
    with pytest.raises(DoesNotFit) as raised:
        rt.preload("late")
    assert str(raised.value).endswith(
        "made (4.0 MiB) exists nowhere else, and its process cannot move it; other (8.0 MiB) "
        "exists nowhere else, and its process cannot move it.\n"
        "  Give it up in its notebook:  rt.forget('made')"
    )
    assert claims(rt) == {"sim:0": 12 << 20}
    view.fill_(2)
    assert (module.weight == 2).all()
    rt.forget("made")
    rt.preload("late")
    assert where(rt)["late"] == "sim:0"


def test_an_adopted_module_is_not_brought_to_a_card(rt):
    rt.adopt("net", linear(1024))
    with pytest.raises(CannotGovern, match=WHY), rt.use("net"):
        pass
    assert where(rt) == {"net": "host"} and claims(rt) == {"host": 4 << 20}


def test_the_report_says_why_nothing_is_parked(rt):
    (versions, *_) = rt.doctor().chapters
    assert dict(versions.rows)["parking"] == f"off, and no model moves: {WHY}"


def test_a_request_for_a_notebooks_room_is_refused_at_once(started, runtime, shared_book):
    """It waited for a notebook that never leaves. `%gpu park asked` changes nothing there."""
    devices = dict(devices="sim:64MiB,host:4GiB", ledger=shared_book)
    rt, kernel = started(**devices)
    keep(kernel, torch.randn(16 << 18))
    other = fakes(runtime(**devices), m="50MiB")
    for _ in range(2):
        with pytest.raises(DoesNotFit) as raised:
            other.preload("m")
        assert f"its process cannot move it ({WHY})" in str(raised.value)
        assert "%gpu free" in str(raised.value) and "forget" not in str(raised.value)
        rt.park("asked")
    with pytest.raises(GpuError, match=rf"cannot move it \({WHY}\)\.\n.*%gpu free"):
        rt.park()
