"""The table of replays: a row for each choice, with the reference."""

import pytest

from gpu_runtime.backtest import CLAIRVOYANT, UseHistory, compare
from gpu_runtime.errors import BadSetting, GpuError
from gpu_runtime.owner.history import backtest
from tests.backtest.test_replay import history
from tests.owner.conftest import runtime  # noqa: F401

PAST = history(*((15 * n, "abca"[n % 4]) for n in range(30)), a=10, b=6, c=4)


def rows(**choices):
    return list(compare(PAST, **{"devices": ["10GB"], "hosts": ["0GB"], **choices}))


def test_the_reference_and_the_clairvoyant_are_always_there():
    found = rows(policies=["keep_score"], engines=["full"])
    assert [(row.policy, row.engine) for row in found] == [
        ("lru", "plain"),
        (CLAIRVOYANT, "plain"),
        ("keep_score", "full"),
    ]
    assert found[0].wait_vs_lru == 1.0 and found[0].requests == 30
    for row in found:
        assert row.wait_vs_lru == pytest.approx(row.wait_s / found[0].wait_s, abs=1e-3)
        assert row.wait_p50_s <= row.wait_p99_s <= row.wait_s


def test_the_clairvoyant_keeps_the_model_that_is_used_next():
    """Of a and b, the model b is used later, or never again. The policy lru evicts a, which is older."""
    for last in ((), ((80, "b"),)):
        uses = ((0, "a"), (20, "b"), (40, "c"), (60, "a"), *last)
        past = history(*uses, a=10, b=10, c=10)
        found = compare(past, devices=["20GB"], hosts=["0GB"], policies=["lru"], engines=["plain"])
        loads = {row.policy: row.loads for row in found}
        assert loads == {"lru": len(uses), CLAIRVOYANT: len(uses) - 1}


def test_a_row_has_the_calls_a_second_of_the_whole_replay():
    """Two uses of 1 s, 99 s apart. The first one waits for the load of 10 s."""
    past = history((50, "a"), (149, "a"), a=10)
    [row, _] = compare(past, devices=["10GB"], hosts=["0GB"], policies=["lru"], engines=["plain"])
    assert (row.requests, row.requests_per_s) == (2, 0.02)
    assert (row.wait_s, row.wait_p50_s, row.wait_p99_s) == (10.0, 10.0, 10.0)


def test_percents_are_of_all_models_and_a_card_holds_at_least_the_largest():
    found = rows(devices=["10%", "80%", "12GB"], hosts=["50%"], policies=["lru"], engines=["plain"])
    assert {row.device_bytes for row in found} == {10 * 10**9, 16 * 10**9, 12 * 10**9}
    assert {row.host_bytes for row in found} == {10 * 10**9}


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"policies": ["mru"]}, "^policy='mru' cannot be used: it must be one of lru"),
        ({"engines": ["warp"]}, "engine='warp'.*plain, full, bounded"),
        ({"devices": ["much"]}, "device='much'.*80GB"),
        ({"devices": ["-5%"]}, "device='-5%'"),
        ({"hosts": ["nan%"]}, "host='nan%'"),
        ({"devices": ["5GB"]}, "device='5GB'.*10.0GB, the size of a"),
    ],
)
def test_a_wrong_choice_is_one_sentence(choices, message):
    with pytest.raises(BadSetting, match=message):
        rows(**choices)


def test_an_empty_history_is_refused():
    with pytest.raises(GpuError, match="nothing to replay"):
        list(compare(UseHistory({}, ())))


def test_one_file_alone_is_refused(tmp_path):
    with pytest.raises(GpuError, match="has two files"):
        backtest(None, tmp_path / "r.csv")


def test_days_beside_a_trace_are_refused(tmp_path):
    """They had no effect."""
    with pytest.raises(
        BadSetting, match="^days=7.0 cannot be used: it must be left out beside a trace"
    ):
        backtest(None, tmp_path / "r.csv", tmp_path / "m.csv", days=7.0)


def test_the_journal_of_a_runtime_is_replayed(runtime):  # noqa: F811
    """Two models of 14 GiB on a card of 24 take turns."""
    rt = runtime(devices="sim:24GiB,host:64GiB")
    for name in ("a", "b"):
        rt.register(name, backend="fake", size="14GiB")
    for name in ("a", "b", "a"):
        with rt.use(name):
            pass
    frame = rt.backtest(policy="lru", device="24GiB", host="64GiB")
    assert list(frame["policy"]) == ["lru", CLAIRVOYANT, "lru"]
    assert frame["requests"].iloc[0] >= 2 and "each counts as 1 s" in frame.attrs["note"]
