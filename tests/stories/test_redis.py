"""Kernels that share a Redis which fails. They keep their models, and no byte is granted twice."""

from collections.abc import Iterator

import pytest

from gpu_runtime import LedgerUnavailable, Runtime
from gpu_runtime.rendering.render import shown
from gpu_runtime.units import GIB
from tests.clock import PATIENCE
from tests.owner.conftest import claims, fakes, where
from tests.redis_server import RedisServer, redis_server

from .kernels import LET_GO, LOADED, USED, refused_until

pytestmark = pytest.mark.parametrize("ledger", ["redis"], indirect=True)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server that only one test uses."""
    with redis_server() as server:
        yield server


def test_a_flushed_redis_does_not_free_a_card_in_use(redis, other, here):
    other.do(LOADED, USED)
    fakes(here, llama="14GiB")
    redis.cli("FLUSHALL")
    refused_until(here, "llama", f"qwen .* is in use by pid {other.process.pid}")
    assert claims(here)["sim:0"] == 14 * GIB
    other.do(LET_GO)
    with here.use("llama", timeout=PATIENCE):
        assert where(here) == {"llama": "sim:0", "qwen": "host"}


@pytest.mark.parametrize("killed", [False, True])
def test_what_ends_while_redis_is_away_is_known_when_it_is_back(redis, other, here, killed):
    """While Redis is away, nothing is granted. Cells continue, and their releases are written later."""
    other.do(LOADED, USED)
    fakes(here, llama="14GiB")
    redis.kill()
    with pytest.raises(LedgerUnavailable, match="does not answer"):
        here.preload("llama", timeout=PATIENCE)
    if killed:
        other.end()
    else:
        other.do(LET_GO)
    redis.start()
    with here.use("llama", timeout=PATIENCE):
        assert where(here)["llama"] == "sim:0"
        assert claims(here) == {"sim:0": 14 * GIB} | ({} if killed else {"host": 14 * GIB})


def test_one_view_over_all_hosts(monkeypatch, ledger, here):
    """Each host has a page with its leases. This host is first, and the others are ordered by name."""
    fakes(here, llama="14GiB").preload("llama")
    with monkeypatch.context() as there:
        zeros = "00000000-0000-0000-0000-000000000000"
        there.setattr("gpu_runtime.ledgers.redis.ledger.boot_id", lambda: zeros)
        there.setattr("socket.gethostname", lambda: "far-away")
        far = Runtime(devices="sim:2x40GiB,host:100GiB", ledger=ledger)
    with far:
        fakes(far, qwen="30GiB").preload("qwen")
        mine, theirs = here.status_all()
        assert [lease.name for lease in mine.leases()] == ["llama"]
        assert [lease.name for lease in theirs.leases()] == ["qwen"] and theirs.host == "far-away"
        claimed = {view.device.id: view.claimed_bytes for view in theirs.devices}
        assert claimed == {"sim:0": 30 * GIB, "sim:1": 0, "host": 0}
        told = repr(shown("status", here.status_all()))
        assert "(this host)" in told and "far-away" in told
        assert told.index("llama") < told.index("qwen")
