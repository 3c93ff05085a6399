"""How much RAM the cgroups of a process still allow, from files as Linux writes them."""

import math

import pytest

from gpu_runtime.devices.cgroups import ram_left

CACHED = "anon 5\ninactive_file 30\ntotal_inactive_file 30\n"


def group(folder, limit, used, *, version):
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    if version == 2:
        names = ("memory.max", "memory.current", "memory.stat")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (f"{limit}\n", f"{used}\n", CACHED), strict=True):
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("version", "top", "line"),
    [(1, "memory", "4:memory:/user/ann\n3:cpu:/user"), (2, "", "0::/user/ann")],
)
def test_the_tightest_limit_from_the_own_group_to_the_top_counts(tmp_path, version, top, line):
    own = tmp_path / "own"
    own.write_text(f"{line}\n")
    user = tmp_path / top / "user"
    assert ram_left(tmp_path, own) == math.inf
    group(user / "ann", "max" if version == 2 else 2**63 - 4096, 10, version=version)
    assert ram_left(tmp_path, own) == math.inf
    group(user, 1000, 400, version=version)
    assert ram_left(tmp_path, own) == 630  # cached pages of files come free first
    group(user / "ann", 500, 450, version=version)
    assert ram_left(tmp_path, own) == 80
    group(user / "ann", 100, 450, version=version)
    assert ram_left(tmp_path, own) == 0


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_sees_its_own_group_at_the_top(tmp_path, version):
    own = tmp_path / "own"
    own.write_text("4:memory:/docker/4f2a\n" if version == 1 else "0::/../4f2a\n")
    group(tmp_path / "memory" if version == 1 else tmp_path, 1000, 400, version=version)
    assert ram_left(tmp_path, own) == 630


def test_where_there_are_no_cgroups_nothing_is_limited(tmp_path):
    assert ram_left(tmp_path, tmp_path / "none") == math.inf
