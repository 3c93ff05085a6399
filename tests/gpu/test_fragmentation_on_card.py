"""The map of a real card's allocator has torch's own figures, and defragmenting frees the bytes that the map states."""

import pytest

from gpu_runtime import Runtime
from gpu_runtime.units import MIB

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


@pytest.fixture
def rt(tmp_path, settle):
    with Runtime(devices="cuda", ledger=f"keeper://{tmp_path}/ledger", monitor=False) as rt:
        yield rt


def tensor(megabytes: int):
    return torch.empty(megabytes * MIB, dtype=torch.uint8, device="cuda")


def test_the_map_has_torch_s_figures_and_defragmenting_frees_the_releasable_bytes(rt):
    """Defragmenting frees empty segments. Holes between kept tensors stay. Every figure of the map is exact."""
    kept = [tensor(3) for _ in range(12)]
    whole = [tensor(64) for _ in range(4)]
    del kept[::2], whole
    (map,) = (one for one in rt.allocator_maps() if one.device == "cuda:0")
    stats = torch.cuda.memory_stats()
    assert (map.allocated_bytes, map.reserved_bytes) == (
        stats["allocated_bytes.all.current"],
        stats["reserved_bytes.all.current"],
    )
    assert map.inactive_bytes - map.releasable_bytes == stats["inactive_split_bytes.all.current"]
    assert map.releasable_bytes >= 4 * 64 * MIB and map.largest_free_bytes >= 64 * MIB
    assert sum(segment.bytes for segment in map.segments) == map.reserved_bytes
    driver_before = torch.cuda.mem_get_info()[0]
    assert rt.defrag().bytes == map.releasable_bytes
    assert torch.cuda.memory_reserved() == map.reserved_bytes - map.releasable_bytes
    freed = torch.cuda.mem_get_info()[0] - driver_before
    assert freed == pytest.approx(map.releasable_bytes, abs=8 * MIB)  # the driver frees whole pages
    row = rt.fragmentation().set_index("device").loc["cuda:0"]
    assert (
        row["releasable_bytes"] == 0
        and row["inactive_bytes"] == map.inactive_bytes - map.releasable_bytes
    )
    del kept


def test_the_pulse_changes_with_every_allocation_and_only_then(rt):
    first = rt.probe.pulse()
    assert rt.probe.pulse() == first
    kept = tensor(1)
    second = rt.probe.pulse()
    del kept
    assert len({first, second, rt.probe.pulse()}) == 3
