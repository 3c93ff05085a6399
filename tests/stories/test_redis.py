"""Kernels that share a Redis which fails. They keep their models, and no byte is granted twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_runtime import Busy, LedgerUnavailable, Runtime
from gpu_runtime.units import GIB
from tests.clock import PATIENCE, scaled
from tests.owner.conftest import claims, fakes, where
from tests.redis_server import RedisServer, redis_server
from tests.stories.test_processes import DEVICES, Kernel

HOLD = "rt.register('qwen', backend='fake', size='14GiB'); u = rt.use('qwen'); u.__enter__()"
LET_GO = "type(u).__exit__(u, None, None, None)"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def ledger(redis: RedisServer) -> str:
    return redis.fresh()


@pytest.fixture
def other(ledger: str) -> Iterator[Kernel]:
    kernel = Kernel(ledger)
    yield kernel
    kernel.end()


@pytest.fixture
def here(ledger: str) -> Iterator[Runtime]:
    rt = Runtime(devices=DEVICES, ledger=ledger, eviction_grace_seconds=0)
    yield rt
    rt.close()


def test_a_flushed_redis_does_not_free_a_card_in_use(redis, other, here):
    assert other.tell(HOLD) == "done"
    fakes(here, llama="14GiB")
    redis.cli("FLUSHALL")
    with (
        pytest.raises(Busy, match=f"qwen .* is in use by pid {other.process.pid}"),
        here.use("llama", timeout=scaled(1.5)),
    ):
        pass
    assert claims(here)["sim:0"] == 14 * GIB
    assert other.tell(LET_GO) == "done"
    with here.use("llama", timeout=PATIENCE):
        assert where(here) == {"llama": "sim:0", "qwen": "host"}


def test_what_ends_while_redis_is_away_is_known_when_it_is_back(redis, other, here):
    """While Redis is away, nothing is granted. Cells continue, and their releases are written later."""
    assert other.tell(HOLD) == "done"
    fakes(here, llama="14GiB")
    redis.kill()
    with pytest.raises(LedgerUnavailable, match="does not answer"), here.use("llama", timeout=5):
        pass
    assert other.tell(LET_GO) == "done"
    redis.start()
    with here.use("llama", timeout=PATIENCE):
        assert where(here) == {"llama": "sim:0", "qwen": "host"}


def test_a_kernel_killed_while_redis_is_away_leaves_nothing_behind(redis, other, here):
    assert other.tell(HOLD) == "done"
    fakes(here, llama="14GiB")
    redis.kill()
    other.end()
    redis.start()
    with here.use("llama", timeout=PATIENCE):
        assert claims(here) == {"sim:0": 14 * GIB}


def test_a_recall_crosses_kernels(other, here):
    """A request makes another kernel offload its model. Notifications are local sockets, also with Redis."""
    held = "rt.register('qwen', backend='fake', size='14GiB'); rt.preload('qwen')"
    assert other.tell(held) == "done"
    fakes(here, llama="14GiB")
    with here.use("llama", timeout=PATIENCE):
        assert where(here) == {"llama": "sim:0", "qwen": "host"}


def test_one_view_over_all_hosts(monkeypatch, ledger, here):
    """Each host has a page with its leases. This host is first, and the others are ordered by name."""
    from gpu_runtime.rendering.render import shown

    fakes(here, llama="14GiB")
    here.preload("llama")
    with monkeypatch.context() as there:
        there.setattr(
            "gpu_runtime.ledgers.redis.ledger.boot_id",
            lambda: "00000000-0000-0000-0000-000000000000",
        )
        there.setattr("socket.gethostname", lambda: "far-away")
        far = Runtime(devices="sim:2x40GiB,host:100GiB", ledger=ledger)
    try:
        fakes(far, qwen="30GiB")
        far.preload("qwen")
        mine, theirs = here.status_all()
        assert [lease.name for lease in mine.leases()] == ["llama"]
        assert [lease.name for lease in theirs.leases()] == ["qwen"] and theirs.host == "far-away"
        assert [
            (view.device.id, view.claimed_bytes) for view in theirs.devices if view.claimed_bytes
        ] == [("sim:0", 30 * GIB)]
        told = repr(shown("status", here.status_all()))
        assert "(this host)" in told
        assert "far-away" in told
        assert told.index("llama") < told.index("qwen")
    finally:
        far.close()
