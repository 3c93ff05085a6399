"""Every setting has the documented effect. There is one test for each setting."""

import asyncio
import json
import os
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpu_runtime import BadSetting, DoesNotFit, LoadFailed, NotAllowed
from gpu_runtime.attribution import name_of
from gpu_runtime.facts import Drop, Move
from gpu_runtime.owner import registry
from gpu_runtime.serving.gateway import Gateway
from gpu_runtime.settings import NAMES
from gpu_runtime.telemetry import hours
from gpu_runtime.units import GIB

from .conftest import claims, fakes, loaded, where

PROVEN: set[str] = set()
FILES = {  # of the settings that are tested with real servers, or with what they are about
    "core/test_alerts.py": "gpu_alerts",
    "core/test_hub.py": "gpu_console_operator_groups gpu_console_user_names",
    "devices/test_probe.py": "gpu_devices",
    "faces/test_gate.py": "gpu_console_token gpu_console_viewer_token",
    "faces/test_members.py": "gpu_console_hours",
    "faces/test_login.py": "gpu_console_operators gpu_console_viewers",
    "faces/test_sockets.py": "gpu_console_read_only",
    "faces/test_waiting.py": "gpu_progress_seconds",
    "owner/test_disk.py": "gpu_park_dir gpu_park_disk_gb gpu_park_encrypt gpu_hibernate_seconds",
    "owner/test_kernel.py": "gpu_park gpu_park_idle_seconds gpu_park_turn_seconds",
    "owner/test_look_ahead.py": "gpu_prefetch",
    "owner/test_other_holdings.py": "gpu_who_names",
    "owner/test_runtime.py": "enable_cpu_offload enable_memory_governor inference_memory_limit_gb",
    "owner/test_shadows.py": "gpu_shadows",
    "serving/test_cors.py": "gpu_serve_cors",
    "serving/test_ending.py": "gpu_serve_grace_seconds",
    "serving/test_gateway.py": "gpu_serve_queue gpu_serve_breaker_failures "
    "gpu_serve_breaker_seconds gpu_most_wait",
    "serving/test_keys.py": "gpu_serve_keys",
    "serving/test_request_log.py": "gpu_serve_log gpu_serve_log_names",
    "stories/test_handlers.py": "gpu_return_at_exit",
}
ELSEWHERE = {name: file for file, names in FILES.items() for name in names.split()}


def proves(setting: str):
    PROVEN.add(setting)
    return lambda test: test


@proves("gpu_memory_max_percent")
def test_the_part_of_a_gpu_that_may_be_claimed(runtime):
    rt = fakes(runtime(gpu_memory_max_percent=0.5), a="13GiB")
    with pytest.raises(DoesNotFit, match="12.0 GiB"):
        rt.preload("a")


@proves("cpu_memory_max_percent")
def test_the_part_of_ram_that_the_warm_pool_may_take(runtime):
    for percent, step in ((0.5, Move), (0.1, Drop)):
        rt = fakes(runtime(cpu_memory_max_percent=percent), a="14GiB", b="14GiB")
        rt.preload("a")
        assert type(rt.plan("b").steps[0]) is step


@proves("inference_gpu_index")
def test_the_only_gpu_to_use(runtime):
    rt = loaded(runtime(devices="sim:3x24GiB,host:64GiB", inference_gpu_index=1), a="20GiB")
    rt.register("b", backend="fake", size="3GiB", devices="sim:0")
    rt.preload("b")
    assert where(rt) == {"a": "sim:1", "b": "sim:0"}, "a model's own cards come first"
    loaded(rt, c="20GiB")
    assert where(rt) == {"a": "host", "b": "sim:0", "c": "sim:1"}


@proves("gpu_catalog")
@proves("inference_gpu_layers")
@proves("inference_backend")
def test_the_catalogue_and_what_its_models_leave_unsaid(runtime, tmp_path):
    (tmp_path / "models.yaml").write_text("models: {a: {path: /a, memory: 1GiB}}")
    rt = runtime(
        catalog=str(tmp_path / "models.yaml"), inference_gpu_layers=7, inference_backend="llamacpp"
    )
    spec = rt.plan("a") and rt._catalogue.spec("a")
    assert (spec.backend, spec.options) == ("llama_cpp", {"gpu_layers": 7})
    assert rt.catalog_names() == ("a",)
    assert runtime(catalog=str(tmp_path / "none")).catalog_names() == ()


@proves("inference_gpu_layers")
@pytest.mark.parametrize("layers", [0, -1])
def test_layers_on_the_cpu_do_not_simulate_the_cards(runtime, monkeypatch, layers):
    """A model with its own number of layers, or of another backend, still uses the GPU."""
    from gpu_runtime.devices import drivers

    looked = []
    monkeypatch.setattr(drivers, "visible_cards", lambda *a, **k: looked.append(a))
    rt = runtime(devices="auto", inference_gpu_layers=layers)
    assert looked
    with_own = rt.register("own", "/no/such.gguf", size="1GiB", gpu_layers=20)
    without = rt.register("none", "/no/such.gguf", size="1GiB")
    assert (with_own.options["gpu_layers"], without.options["gpu_layers"]) == (20, layers)


@proves("gpu_engine_ports")
@proves("gpu_engine_start_seconds")
def test_where_servers_listen_and_how_long_they_may_take(runtime):
    backend = runtime(gpu_engine_ports="9000-9001", gpu_engine_start_seconds="2m")._session.backend(
        "vllm"
    )
    assert (backend._port_range, backend._start_seconds) == (range(9000, 9002), 120.0)


@proves("development_cpu_only")
def test_simulated_even_where_there_is_a_gpu(runtime, monkeypatch):
    from gpu_runtime.devices import drivers

    monkeypatch.setattr(drivers, "visible_cards", lambda *a, **k: pytest.fail("asked the driver"))
    assert runtime(devices="auto", development_cpu_only=True).simulated


@proves("gpu_ledger")
def test_where_the_book_is_kept(runtime, tmp_path):
    rt = fakes(runtime(ledger=f"keeper://{tmp_path}/here"), a="3GiB")
    assert (tmp_path / "here").is_dir() and rt.status().ledger == f"keeper://{tmp_path}/here"


@proves("gpu_policy")
def test_who_leaves_first(runtime, clock):
    for policy, leaves in (("lru", "old"), ("cost_aware", "cheap")):
        rt = runtime(policy=policy, clock=clock, monitor=False)
        fakes(rt, old="7GiB", cheap="7GiB", new="12GiB")
        rt.preload("old")
        clock.advance(10)
        rt.preload("cheap")
        clock.advance(1)
        for name, seconds in (("old", 900.0), ("cheap", 0.001)):
            resident = registry.find(rt._session, name)
            resident.lease = replace(resident.lease, reload_seconds=seconds)
        assert [step.lease.partition("/")[2] for step in rt.plan("new").steps] == [leaves, "new"]


@proves("gpu_placement")
def test_which_card_a_model_goes_to(runtime):
    cards = {"best-fit": "sim:0", "most-free": "sim:1", "fewest-evictions": "sim:0"}
    for placement, card in cards.items():
        rt = runtime(devices="sim:2x24GiB,host:64GiB", gpu_placement=placement)
        rt.register("first", backend="fake", size="5GiB", devices=("sim:0",))
        rt.preload("first")
        assert rt.plan("8GiB").shares[0].device == card


@proves("gpu_placement")
def test_whose_eviction_is_the_fewest(runtime, clock):
    """`fewest-evictions` evicts the one used later, although the two least recently used would be enough."""
    for placement, leave in (("best-fit", ["old", "older"]), ("fewest-evictions", ["large"])):
        rt = runtime(gpu_placement=placement, policy="lru", clock=clock, monitor=False)
        fakes(rt, older="5GiB", old="5GiB", large="11GiB", new="10GiB")
        for name in ("older", "old", "large"):
            rt.preload(name)
            clock.advance(10)
        assert sorted(step.lease.partition("/")[2] for step in rt.plan("new").steps[:-1]) == leave


@proves("gpu_split_margin_mb")
def test_what_a_proportional_split_leaves_free_of_each_card(runtime):
    """Each card has 20 GiB: with the margin a part may take 19.5, without it nearly all."""
    for margin, granted in ((512, False), (0, True)):
        rt = runtime(
            devices="sim:2x20GiB,host:64GiB", gpu_memory_max_percent=1.0, gpu_split_margin_mb=margin
        )
        rt.register("big", backend="fake", size="39.5GiB")
        assert rt.plan("big").granted is granted


@proves("gpu_split_overhead")
def test_what_each_card_of_a_split_takes_beyond_its_part(runtime):
    """Helix's ten percent: 15 GiB on each of two cards claim 16.5 on each, also after the load."""
    rt = runtime(devices="sim:2x20GiB,host:64GiB", gpu_split_overhead=0.1)
    rt.register("big", backend="fake", size="30GiB", layout="balanced")
    rt.preload("big")
    assert [size / GIB for size in claims(rt).values()] == pytest.approx([16.5, 16.5])
    rt.evict("big")
    assert claims(rt) == {"host": 30 * GIB}


@proves("gpu_fraction_factor")
def test_ndif_s_factor_in_the_place_of_the_estimate(runtime):
    """Factor 3: 2 GiB claim 6. 8 GiB would claim 24, more than the card, so the whole card."""
    rt = runtime(
        devices="sim:2x20GiB,host:64GiB", gpu_memory_max_percent=1.0, gpu_fraction_factor=3
    )
    fakes(rt, small="2GiB", big="8GiB", other="2GiB")
    rt.preload("small")
    rt.preload("big")
    assert claims(rt) == {"sim:0": 6 * GIB, "sim:1": 20 * GIB}
    assert rt.plan("other").shares[0].device == "sim:0"
    rt.evict("big")
    assert claims(rt) == {"sim:0": 6 * GIB, "host": 8 * GIB}


@proves("fraction_largest_possible")
def test_from_which_part_of_a_card_on_it_is_taken_whole(runtime):
    for largest, claimed in ((0.8, 15), (0.7, 20)):
        rule = dict(gpu_fraction_factor=3, fraction_largest_possible=largest)
        rt = runtime(devices="sim:20GiB,host:64GiB", gpu_memory_max_percent=1.0, **rule)
        loaded(rt, a="5GiB")
        assert claims(rt) == {"sim:0": claimed * GIB}


@proves("gpu_relief")
def test_when_pressure_evicts(runtime, clock):
    for relief, place in (("always", "host"), ("never", "sim:0"), ("auto", "sim:0")):
        rt = loaded(runtime(gpu_relief=relief, clock=clock, monitor=False), a="18GiB")
        clock.advance(1000)
        rt.tick()
        assert where(rt) == {"a": place}, relief


@proves("eviction_grace_seconds")
@proves("eviction_idle_threshold_seconds")
@proves("eviction_idle_high_seconds")
@pytest.mark.parametrize(
    "setting, size, place",
    [
        ("eviction_grace_seconds", "20.5GiB", "disk"),
        ("eviction_idle_threshold_seconds", "14GiB", "host"),
        ("eviction_idle_high_seconds", "18GiB", "host"),
    ],
)
def test_how_long_idle_is_idle_enough(runtime, clock, setting, size, place):
    """At the levels CRITICAL, MODERATE and HIGH, a model stays until it was idle for the time of the setting."""
    rt = loaded(runtime(**{setting: 77.0}, gpu_relief="always", clock=clock, monitor=False), a=size)
    clock.advance(76)
    rt.tick()
    assert where(rt) == {"a": "sim:0"}
    clock.advance(16)
    rt.tick()
    assert where(rt) == {"a": place}


@proves("pressure_check_interval_seconds")
def test_how_often_pressure_is_checked(runtime, clock):
    for interval, place in ((500.0, "sim:0"), (50.0, "host")):
        pace = dict(pressure_check_interval_seconds=interval, gpu_relief="always")
        rt = runtime(clock=clock, monitor=False, **pace)
        loaded(rt, a="18GiB")
        clock.advance(100)
        rt.tick()
        assert where(rt) == {"a": place}


@proves("gpu_trust_remote_code")
def test_models_may_bring_code_only_where_that_was_allowed(runtime, tmp_path):
    from tests import tiny_models

    directory = tiny_models.causal_lm(tmp_path / "own")
    (directory / "own_code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_code'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = directory / "config.json"
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    fields = {"model_type": "own_code", "architectures": ["OwnModel"], "auto_map": own}
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    careful = runtime()
    careful.register("own", directory, task="causal-lm")
    with pytest.raises(LoadFailed, match="GPU_TRUST_REMOTE_CODE=true"):
        careful.preload("own")
    for asked in ({"trust_remote_code": True}, {"runtime_args": ["--trust_remote_code"]}):
        with pytest.raises(BadSetting, match="GPU_TRUST_REMOTE_CODE=true"):
            careful.register("other", str(directory), **asked, backend="vllm")
    with pytest.raises(BadSetting, match="GPU_TRUST_REMOTE_CODE=true"):
        careful.load("own", trust_remote_code=True)
    assert not any("own_code" in name for name in sys.modules)
    trusting = runtime(gpu_trust_remote_code=True)
    trusting.register("own", directory, task="causal-lm")
    with trusting.use("own") as model:
        assert type(model).__name__ == "OwnModel"


@proves("gpu_config_file")
def test_the_machine_wide_configuration(runtime, tmp_path):
    me = name_of(os.geteuid())
    (tmp_path / "config.toml").write_text(f'[users.{me}]\nbytes_per_device = "4 GiB"\n')
    rt = fakes(runtime(gpu_config_file=str(tmp_path / "config.toml")), a="5GiB")
    with pytest.raises(NotAllowed, match="at most 4.0 GiB"):
        rt.preload("a")


def test_a_block_that_outlasts_the_cap_is_named_once_and_by_its_own_process(
    runtime, tmp_path, clock, shared_book, caplog
):
    me = name_of(os.geteuid())
    (tmp_path / "config.toml").write_text(f'[users.{me}]\nlongest_lease = "1m"\n')
    settings = {"gpu_config_file": str(tmp_path / "config.toml"), "ledger": shared_book}
    mine, other = (runtime(clock=clock, monitor=False, **settings) for _ in range(2))
    told = []
    with mine.lease("1GiB", purpose="mine"), other.lease("1GiB", purpose="theirs"):
        for seconds in (60, 1, 1, 1):
            clock.advance(seconds)
            mine.tick()
            told.append([event.model for event in mine.why() if event.action == "overstayed"])
    assert told == [[], ["mine#1"], ["mine#1"], ["mine#1"]] and len(caplog.records) == 1


@proves("gpu_fairness")
def test_the_card_hours_of_a_day_are_stated_with_each_request(runtime, tmp_path):
    """What is 12 h old counts half, and what is older than a day not at all. Scripts count. Off, nothing is stated."""
    ledger = f"keeper://{tmp_path}/ledger"
    off, fair = runtime(ledger=ledger), runtime(ledger=ledger, gpu_fairness="day")
    session = fair._session
    card, me, now = fair.status().devices[0].device, session.ledger.owner.user, session.wall()
    size = card.total_bytes * hours.HOUR
    rows = [
        hours.Hour(int(now) - age * hours.HOUR, hours.Key(*whose, card.id, state), held, hours.HOUR)
        for age, used in ((0, hours.OUTSIDE), (12, hours.IDLE), (25, hours.IN_USE))
        for whose, state, held in (
            ((me, "", "m"), used, size),
            (("", "", ""), hours.FREE, 0.0),
        )
    ]
    assert hours.Hours(session.record.path.with_name(hours.FILE)).add(rows, now)
    session._card_hours_at = float("-inf")
    assert (off._session.world().rules.past_use, session.world().rules.past_use) == (None, 1.5)


@proves("gpu_tasks")
@proves("model_boss_allow_cloud_fallback")
def test_what_gpu_serve_starts_with(runtime, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "tasks.yaml").write_text("tasks:\n  summary: {candidates: [small]}\n")

    async def started(**settings):
        gateway = Gateway(runtime(**settings))
        try:
            return set(gateway.serving.tasks), gateway.guard.allowed
        finally:
            await gateway.close()

    assert asyncio.run(started()) == (set(), True)
    assert asyncio.run(
        started(gpu_tasks=str(tmp_path / "tasks.yaml"), model_boss_allow_cloud_fallback=False)
    ) == ({"summary"}, False)


@pytest.mark.parametrize(("setting", "test"), sorted(ELSEWHERE.items()))
def test_the_proof_that_lies_elsewhere_is_there(setting, test):
    assert re.search(setting, (Path(__file__).parents[1] / test).read_text(), flags=re.IGNORECASE)


def test_no_setting_is_without_its_proof():
    assert set(NAMES) == PROVEN | ELSEWHERE.keys()
