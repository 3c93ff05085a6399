"""Two real processes and one book. One process requests that the other's model moves to another card."""

import pytest

from gpu_runtime import GpuError
from gpu_runtime.units import GIB
from tests.clock import PATIENCE
from tests.owner.conftest import claims

from .kernels import LOADED, ONLY_KEEPER

pytestmark = ONLY_KEEPER


@pytest.fixture
def devices() -> str:
    return "sim:3x24GiB,host:64GiB"


def test_another_kernels_model_makes_room_by_moving_over(other, here):
    """A second model needs the whole card, and others are free. The first moves, and nothing is evicted."""
    other.do(LOADED)
    here.register("llama", backend="fake", size="20GiB", devices=("sim:0",))
    moved = here.move(f"qwen@{other.process.pid}", "sim:1,2", timeout=PATIENCE)
    assert moved.done and moved.where == "sim:1,2"
    halves = {"sim:1": 7 * GIB, "sim:2": 7 * GIB}
    assert claims(here) == halves
    with here.use("llama", timeout=PATIENCE):
        assert claims(here) == {"sim:0": 20 * GIB, **halves}
        other.do("u = rt.use('qwen'); assert repr(u.__enter__()) == '<fake qwen on sim:1,2>'")
        with pytest.raises(GpuError, match="in use by"):
            here.move("qwen", "sim:2", timeout=PATIENCE)
        other.do("del u; rt.tick()")
        with pytest.raises(GpuError, match="qwen needs 14.0 GiB; sim:0 has 1.6 GiB free"):
            here.move("qwen", "sim:0", timeout=PATIENCE)
    assert here.evictions().empty
    assert [event.action for event in here.why("qwen")].count("moved") == 1
