"""Each route `/memory/*` answers in the format of the Semantik governor."""

import threading

import pytest

from gpu_runtime import WaitEnded
from gpu_runtime.serving.api import memory
from gpu_runtime.units import GIB, MIB
from tests.clock import PATIENCE

from .app_client import OPERATOR, client

STATS = {
    "cuda_available", "total_mb", "free_mb", "used_mb", "used_percent", "allocated_mb",
    "budget_total_mb", "budget_usable_mb", "cpu_budget_total_mb", "cpu_budget_usable_mb",
    "cpu_used_mb", "models_loaded", "models_offloaded", "pressure_level", "total_evictions",
    "total_offloads", "total_restorations", "total_unloads",
}  # fmt: skip


@pytest.fixture
def rt(runtime):
    """A runtime with an embedding model and a reranker on a card of 24 GiB, of which 21.6 GiB are usable."""
    rt = runtime(eviction_grace_seconds=0, monitor=False)
    rt.register("emb", backend="fake", size="4GiB", model_type="embedding", quantization="float16")
    rt.register("rank", backend="fake", size="2GiB", model_type="reranker")
    rt.preload("emb")
    rt.preload("rank")
    return rt


def test_stats_have_every_field_and_add_up(rt):
    answer = client(rt).get("/memory/stats").json()
    assert answer.keys() == STATS | {"simulated"}
    sizes = [answer[name] // 1024 for name in ("total_mb", "used_mb", "free_mb")]
    assert sizes == [24, 6, 18]
    assert answer["used_percent"] == 25.0 and answer["pressure_level"] == "LOW"
    assert answer["models_loaded"] == 2
    assert answer["budget_usable_mb"] == int(24 * GIB * 0.9) // MIB
    assert (answer["cuda_available"], answer["simulated"]) == (False, True)


def test_counters_hold_law_10(rt):
    http = client(rt)
    http.post("/memory/evict/reranker")
    http.post("/memory/preload", json={"models": [{"name": "rank", "model_type": "reranker"}]})
    answer = http.get("/memory/stats").json()
    assert answer["total_evictions"] == answer["total_offloads"] + answer["total_unloads"] == 1
    assert answer["total_restorations"] == 1


def test_models_have_their_location(rt):
    rt.evict("rank")
    rows = {row["model_name"]: row for row in client(rt).get("/memory/models").json()}
    assert (rows["emb"]["location"], rows["rank"]["location"]) == ("gpu", "cpu")
    emb = rows["emb"]
    assert (emb["model_type"], emb["quantization"]) == ("embedding", "float16")
    assert emb["memory_mb"] == 4096 and emb.keys() >= {"idle_seconds", "use_count"}


def test_evictions_and_the_warm_pool_agree(rt):
    http = client(rt)
    http.post("/memory/evict/embedding")
    [row] = http.get("/memory/evictions").json()
    assert {**row, "timestamp": 0} == {
        "model_name": "emb", "model_type": "embedding", "quantization": "float16",
        "reason": "evict", "action": "offloaded", "memory_freed_mb": 4096, "timestamp": 0,
        "device": "sim:0",
    }  # fmt: skip
    [warm] = http.get("/memory/offloaded").json()
    assert (warm["model_key"], warm["original_device"]) == ("embedding:emb:float16", "sim:0")
    assert warm["seconds_offloaded"] >= 0 and abs(warm["offload_time"] - row["timestamp"]) < 5


def test_an_eviction_keeps_its_model_s_type_after_a_restart(rt, monkeypatch):
    """The new server does not know the model. In an earlier version, the type became "other"."""
    client(rt).post("/memory/evict/embedding")
    monkeypatch.setattr(memory, "kinds", lambda snapshot: {})
    [row] = client(rt).get("/memory/evictions").json()
    assert (row["model_type"], row["quantization"]) == ("embedding", "float16")


@pytest.mark.parametrize("named", ["reranker", "rank", "reranker:rank:"])
def test_a_model_is_evicted_by_its_type_its_name_or_its_key(rt, named):
    answer = client(rt).post(f"/memory/evict/{named}")
    assert answer.status_code == 200
    told = {"status": "evicted", "model_type": named, "models": ["rank"]}
    assert answer.json() == {**told, "memory_freed_mb": 2048}


def test_all_that_a_notebook_holds_is_evicted_by_its_name(rt):
    """`POST /memory/evict/train.ipynb` answered that there is no such model."""
    http = client(rt)
    assert http.post("/memory/evict/train.ipynb").status_code == 400
    rt._session.notebook = "/work/train.ipynb"
    rt.tick()
    answer = http.post("/memory/evict/train.ipynb").json()
    assert (sorted(answer["models"]), answer["memory_freed_mb"]) == (["emb", "rank"], 6 * 1024)
    assert http.post("/memory/evict/train.ipynb").json()["status"] == "no_action"


def test_one_of_two_notebooks_with_the_same_file_name_is_evicted_by_its_path(runtime, tmp_path):
    """`POST /memory/evict/train.ipynb` evicted what both held. `gpu evict` asked which one is meant."""
    settings = {"monitor": False, "eviction_grace_seconds": 0}
    settings["ledger"] = f"keeper:///{tmp_path}/ledger.db"
    held = {}
    for user in ("ann", "bob"):
        held[user] = runtime(**settings)
        held[user].register(f"of-{user}", backend="fake", size="1GiB")
        held[user].preload(f"of-{user}")
        held[user]._session.notebook = f"/{user}/train.ipynb"
        held[user].tick()
    http = client(held["ann"])
    answer = http.post("/memory/evict/train.ipynb")
    assert answer.status_code == 409
    assert "Name one, as in /ann/train.ipynb" in answer.json()["error"]
    answer = http.post("/memory/evict//ann/train.ipynb").json()
    assert (answer["status"], answer["models"]) == ("evicted", ["of-ann"])


@pytest.mark.parametrize("wanted", ["*", "reranker"])
def test_a_notebook_called_like_a_model_type_does_not_hide_the_type(rt, wanted):
    """With a notebook called `*`, `POST /memory/evict/*` meant this notebook alone."""
    rt.pin("emb")  # a pinned model is not one of `*`, nor a reranker
    rt._session.notebook = f"/work/{wanted}"
    rt.tick()
    answer = client(rt).post(f"/memory/evict/{wanted}").json()
    assert (answer["models"], "detail" in answer) == (["rank"], False)


def test_without_a_model_to_evict_nothing_is_done_and_a_wrong_word_is_a_bad_request(rt):
    http = client(rt)
    for kind in ("llm", "vision", "diffusion", "other"):
        answer = http.post(f"/memory/evict/{kind}")
        assert answer.status_code == 200
        assert answer.json() == {"status": "no_action", "model_type": kind}
    for nonsense in ("embeddings", "a/b", "%00", "x" * 5000):
        answer = http.post(f"/memory/evict/{nonsense}")
        assert answer.status_code == 400 and "neither" in answer.json()["error"]


def test_a_model_in_use_stays_and_the_journal_has_the_visitor_who_acted(rt):
    with rt.use("rank"):
        answer = client(rt).post("/memory/evict/reranker").json()
    assert answer["status"] == "no_action" and "in use" in answer["detail"]
    client(rt).post("/memory/evict/reranker")
    [event] = [event for event in rt.why("rank") if event.action == "offloaded"]
    assert "ann, HTTP" in event.by


def test_a_wait_is_ended_and_what_does_not_wait_is_a_conflict(rt):
    """The error of the waiting request has the visitor's name."""
    http, begun, errors = client(rt), threading.Event(), []
    rt.tell_waits(lambda name, wait: begun.set())

    def wait():
        with pytest.raises(WaitEnded) as error, rt.lease("18GiB", purpose="a/b"):
            pass
        errors.append(error.value)

    with rt.use("emb"), rt.use("rank"):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert begun.wait(PATIENCE)
        answer = http.post("/memory/cancel/nobody")
        assert answer.status_code == 409 and "These wait: a/b#1@" in answer.json()["error"]
        answer = http.post("/memory/cancel/a/b")
        waiting.join(PATIENCE)
    assert answer.json() == {"status": "cancelled", "detail": "the wait for a/b#1 was ended"}
    assert errors[0].by.startswith(f"{OPERATOR.name}, HTTP")


@pytest.mark.parametrize("body", [
    {}, {"models": [{"name": "emb", "model_type": "embeddings"}]}, {"models": "emb"},
    {"models": [{"model_type": "llm"}]}, {"models": [{"name": ""}]}, [],
])  # fmt: skip
def test_an_invalid_preload_is_unprocessable(rt, body):
    assert client(rt).post("/memory/preload", json=body).status_code == 422


def test_a_preload_answers_for_each_model(rt):
    rt.evict("emb")
    emb = {"name": "emb", "model_type": "embedding", "quantization": "float16"}
    wanted = {"models": [emb, {"name": "missing"}]}
    answer = client(rt).post("/memory/preload", json=wanted).json()
    assert answer["results"] == {"embedding:emb:float16": True, "other:missing:": False}
    assert "missing" in answer["errors"]["other:missing:"]


@pytest.mark.parametrize("relief", ["auto", "always"])
def test_health_is_false_at_critical_if_relief_always_is_set(runtime, relief):
    """A card that is well packed with idle models is healthy: they leave when others need the room."""
    rt = runtime(gpu_relief=relief)
    rt.register("emb", backend="fake", size="6GiB")
    rt.preload("emb")
    http = client(rt)
    normal = {"healthy": True, "pressure": "LOW", "used_percent": 25.0}
    assert http.get("/memory/health").json().items() > normal.items()
    rt.register("big", backend="fake", size="15GiB")
    rt.preload("big")
    answer = http.get("/memory/health").json()
    assert (answer["healthy"], answer["pressure"]) == (relief == "auto", "CRITICAL")


def test_fragmentation_and_defragmentation(rt):
    http = client(rt)
    answer = http.get("/memory/fragmentation").json()
    assert answer.keys() == {
        "cuda_available", "allocated_mb", "reserved_mb", "fragmentation_mb",
        "fragmentation_percent", "num_alloc_retries", "num_ooms",
    }  # fmt: skip
    assert answer["fragmentation_mb"] == answer["reserved_mb"] - answer["allocated_mb"]
    assert http.post("/memory/defragment").json()["status"] == "defragmentation_triggered"


@pytest.mark.parametrize(("wanted", "why"), [
    ({"name": "rank", "model_type": "embedding"}, "rank is of type reranker, not embedding"),
    ({"name": "emb", "quantization": "int4"}, "the quantization float16, not int4"),
    ({"name": "rank", "quantization": "int4"}, "it has none, not int4"),
])  # fmt: skip
def test_a_preload_of_another_model_than_was_asked_is_not_true(rt, wanted, why):
    rt.evict(wanted["name"])
    answer = client(rt).post("/memory/preload", json={"models": [wanted]}).json()
    [(key, done)] = answer["results"].items()
    assert done is False and why in answer["errors"][key]
    assert not rt.here(wanted["name"])


def test_model_types_are_read_without_regard_to_case(rt):
    """A name such as `LLM` is accepted by the routes, and by `register`."""
    http = client(rt)
    assert http.post("/memory/evict/Reranker").json()["models"] == ["rank"]
    wanted = {"name": "rank", "model_type": "RERANKER"}
    answer = http.post("/memory/preload", json={"models": [wanted]}).json()
    assert answer["results"] == {"reranker:rank:": True}
    assert http.post("/memory/evict/RERANKER:rank:").json()["models"] == ["rank"]
    assert rt.register("chat", backend="fake", size="1GiB", model_type="LLM").model_type == "llm"


def test_without_a_governor_models_are_evicted_and_the_pressure_is_unknown(runtime):
    rt = runtime(enable_memory_governor=False)
    rt.register("rank", backend="fake", size="2GiB", model_type="reranker", quantization="int8")
    rt.preload("rank")
    http = client(rt)
    [row] = http.get("/memory/models").json()
    assert (row["model_type"], row["quantization"]) == ("reranker", "int8")
    assert http.post("/memory/evict/reranker").json()["models"] == ["rank"]
    assert not rt.here("rank")
    assert http.get("/memory/stats").json()["pressure_level"] == "UNKNOWN"
    assert http.get("/memory/health").json()["pressure"] == "UNKNOWN"


def test_every_idle_model_is_evicted_and_with_drop_leaves_ram(rt):
    http = client(rt)
    rt.register("idle", backend="fake", size="1GiB")
    rt.preload("idle")
    assert "idle" in http.post("/memory/evict/*").json()["models"]
    assert "idle" in http.post("/memory/evict/*?drop=true").json()["models"]
    assert "idle" not in {lease.name for lease in rt.status().leases()}


def test_an_unknown_parameter_is_refused_with_the_nearest_name(rt):
    """`?dorp=true` evicted to RAM, as if nothing had been asked."""
    http = client(rt)
    answer = http.post("/memory/evict/*?dorp=true")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "dorp")
    assert "Did you mean drop?" in error["message"]
    assert len(http.get("/memory/models").json()) == 2
    assert http.get("/memory/models?limit=1").status_code == 400
    assert http.get("/health?verbose=1").status_code == 200
