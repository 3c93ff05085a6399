"""What can be planned: registered models, and also paths, sizes and names that are not registered."""

import contextlib
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest

from gpu_runtime import Runtime
from gpu_runtime.errors import (
    AmbiguousName,
    BadSetting,
    BadSize,
    GpuError,
    LoadFailed,
    NotAModel,
    UnknownModel,
    UnknownSize,
)
from gpu_runtime.facts import Declared, Lease, Move
from gpu_runtime.owner import load_and_plan
from gpu_runtime.owner.resident import Resident
from gpu_runtime.rendering import render
from gpu_runtime.units import GIB, MIB
from tests import tiny_models
from tests.clock import PATIENCE, finished, until

from .conftest import alongside, fakes, loaded


def parts(plan):
    return [(part.name, part.source) for part in plan.footprint.parts]


@pytest.fixture
def rt(runtime, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return runtime(devices="sim:24GiB,host:64GiB")


def test_a_path_is_planned_without_registering_it(rt, tmp_path):
    tiny_models.causal_lm(tmp_path / "models" / "writer")
    plan = rt.plan("models/writer")
    assert plan.granted
    assert parts(plan) == [("weights", "safetensors header")]
    assert plan.name == "models/writer"
    assert rt.specs() == () and not rt.plan("models/writer").obstacle
    rt.register("writer", "models/writer")
    assert rt.plan("writer").footprint == plan.footprint


def test_a_tilde_is_the_home_directory_in_every_verb_with_a_path(rt, tmp_path, monkeypatch):
    """In 0.2 only the catalogue read it so; `%gpu load m ~/m` found no such file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_models.causal_lm(tmp_path / "model")
    assert rt.plan("~/model").granted
    assert rt.load("loaded", Path("~/model")).done
    assert rt.register("m", "~/model").source == str(tmp_path / "model")


def test_a_folder_its_file_and_its_entry_have_the_same_plan(runtime, tmp_path, monkeypatch):
    """A folder of GGUF files was planned as a model of transformers, without the cache of llama.cpp."""
    monkeypatch.chdir(tmp_path)
    rt = runtime(devices="sim:24GiB,host:64GiB", catalog=str(tmp_path / "catalogue"))
    (tmp_path / "models").mkdir()
    tiny_models.gguf_lm(tmp_path / "models" / "writer.gguf")
    (tmp_path / "models.yaml").write_text("models: {shelved: {path: models}}")
    rt.apply(str(tmp_path / "models.yaml"))
    rt.register("writer", "models")
    names = ("models", "models/writer.gguf", "shelved", "writer")
    plans = [rt.plan(name).footprint for name in names]
    assert all(plan == plans[0] for plan in plans)
    assert [part.name for part in plans[0].parts] == ["weights", "kv_cache", "activations"]


@pytest.mark.parametrize(("stored", "config"), [("float16", "float32"), ("float32", "bfloat16")])
def test_a_plan_has_the_dtype_of_the_load(rt, tmp_path, stored, config):
    """transformers converts the weights to the config's dtype, and the cache has it too."""
    whole = tiny_models.causal_lm(tmp_path / config, size="8 MiB", dtype=config)
    other = tiny_models.causal_lm(tmp_path / stored, size="8 MiB", dtype=stored)
    shutil.copy(whole / "config.json", other / "config.json")
    plans = [rt.plan(str(path), context_length=64).footprint.bytes for path in (whole, other)]
    assert plans[0] == plans[1]
    rt.load("writer", str(other))
    (lease,) = rt.status().leases()
    assert lease.bytes == pytest.approx(rt.plan(str(whole)).footprint.bytes, rel=0.02)


@pytest.mark.parametrize("act", ["plan", "register"])
@pytest.mark.parametrize(
    "broken", ["shard", "config", "single", "gguf", "gguf in a folder", "part"]
)
def test_a_missing_file_is_named(rt, tmp_path, broken, act):
    """The hub's cache has dangling links after a part was deleted. A part of a split model may be alone."""
    folder = tmp_path / "models"
    if broken == "part":
        folder.mkdir()
        tiny_models.gguf_lm(folder / "w-00002-of-00002.gguf")
        named, source = "w-00001-of-00002.gguf", folder
    else:
        if "gguf" in broken:
            folder.mkdir()
            file = tiny_models.gguf_lm(folder / "m.gguf")
        else:
            tiny_models.causal_lm(folder, shard="300KB" if broken == "shard" else None)
            names = {"shard": "model-00001-of-*", "config": "config.json", "single": "model.s*"}
            file = next(folder.glob(names[broken]))
        file.unlink()
        file.symlink_to("../blobs/gone")
        named, source = file.name, file if broken == "gguf" else folder
    with pytest.raises(GpuError) as error:
        rt.plan(str(source)) if act == "plan" else rt.register("m", str(source))
    (line,) = [line for line in str(error.value).splitlines() if named in line]
    assert "missing" in line


def test_a_revision_that_was_not_downloaded_is_named(rt, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tiny_models.hub_cache(tmp_path / "hub", "org/m", tiny_models.causal_lm(tmp_path / "source"))
    with pytest.raises(GpuError, match="in the revision v2.*hf download org/m --revision v2"):
        rt.register("m", "org/m", revision="v2")


def test_a_file_of_a_checkpoint_is_planned_as_the_checkpoint(rt, tmp_path):
    tiny_models.causal_lm(tmp_path / "writer", size="8 MiB", shard="1MB")
    part = next((tmp_path / "writer").glob("model-00001-of-*.safetensors"))
    assert rt.plan(str(part)).footprint == rt.plan("./writer").footprint


def test_a_plan_says_how_long_loads_took_alone_and_beside_other_models(rt, monkeypatch):
    """The journal has both, so a person sees what another model costs."""
    took = {"qwen": [4.0, 6.0], "llama": [1.0]}
    load = Resident.load

    def timed(resident, *args):
        """Loads the model, and reports the seconds of this test."""
        handle, shares, _ = load(resident, *args)
        return handle, shares, took[resident.spec.name].pop(0)

    monkeypatch.setattr(Resident, "load", timed)
    fakes(rt, qwen="4GiB", llama="4GiB")
    for beside in (False, True):
        with rt.use("llama") if beside else contextlib.nullcontext():
            rt.preload("qwen")
        assert "Loads took" not in rt.plan("qwen").because, "nothing would be loaded"
        rt.evict("qwen", drop=True)
    words = "Loads took 4.0 s alone, and 6.0 s beside llama."
    assert rt.plan("qwen").because.endswith(words)
    rt.evict("llama", drop=True)
    assert "Loads took" not in rt.plan("llama").because


@pytest.mark.processes
def test_a_plan_opens_no_torch(tmp_path):
    tiny_models.causal_lm(tmp_path / "m")
    code = (
        "import sys, gpu_runtime; rt = gpu_runtime.Runtime(devices='sim:1GiB', ledger='memory:'); "
        f"print(rt.plan({str(tmp_path / 'm')!r}).footprint.bytes, 'torch' in sys.modules)"
    )
    said = finished([sys.executable, "-c", code], check=True).stdout
    assert said.split()[1] == "False" and int(said.split()[0]) > MIB / 2


def test_a_context_can_be_planned_for_before_anything_is_registered(rt, tmp_path):
    directory = str(tiny_models.causal_lm(tmp_path / "m"))
    plan = rt.plan(directory, context_length=200, sequences=4, dtype="bfloat16")
    found = [("weights", "safetensors header"), ("kv_cache", "config"), ("activations", "config")]
    assert parts(plan) == found
    weights, cache, _ = plan.footprint.parts
    assert weights.bytes == rt.plan(directory).footprint.bytes // 2
    assert cache.bytes == 4 * 200 * 2 * (2 * 16 * 2) * 2
    rt.register("m", directory)
    assert (
        rt.plan("m", context_length=200, sequences=4, dtype="bfloat16").footprint == plan.footprint
    )
    assert rt.plan("m").footprint.working_bytes == 0
    with pytest.raises(BadSetting, match="context_length=0"):
        rt.plan("m", context_length=0)


def test_a_name_that_tells_its_size_can_be_planned(rt):
    """The plan is marked as a guess. It does not advise to load a model that is not on this machine."""
    plan = rt.plan("org/llama-7B-awq")
    assert plan.footprint.bytes == pytest.approx(7e9 * 4.5 / 8 * 1.3)
    assert parts(plan) == [("weights", "name"), ("margin", "name")]
    assert plan.obstacle == "org/llama-7B-awq is not here, and only its name gives its size"


def test_a_slip_in_a_known_name_is_no_guess(rt):
    fakes(rt, **{"qwen-7B": "14GiB"})
    with pytest.raises(UnknownModel, match="Did you mean qwen-7B"):
        rt.plan("qwem-7B")


def test_a_name_with_a_size_is_planned_though_another_process_has_a_similar_one(
    runtime, shared_book
):
    """Another person's models must not stop a plan that is possible without them."""
    a, b = (runtime(ledger=shared_book) for _ in "ab")
    fakes(a, **{"llama-8B": "14GiB"})
    a.preload("llama-8B")
    assert b.plan("llama-7B").footprint.bytes


def test_a_path_that_is_not_there_tells_both_readings(rt, tmp_path):
    """One slash may be a path or a hub id, so the error names both. Two slashes are a path."""
    with pytest.raises(NotAModel) as error:
        rt.plan("models/writter")
    assert str(error.value) == (
        f"models/writter is neither a directory (there is no {tmp_path}/models/writter) nor a hub id that was "
        f"downloaded. Correct the path, or download it first:  hf download models/writter."
    )
    for path in ("./models/writer", "a/b/c", "m.gguf", "/no/such/place"):
        with pytest.raises(NotAModel, match=f"there is no {os.path.abspath(path)}"):
            rt.plan(path)


def test_a_directory_that_holds_no_model_says_what_it_holds(rt, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("")
    with pytest.raises(NotAModel, match="looked for config.json .* and found todo.txt"):
        rt.plan("notes")
    with pytest.raises(LoadFailed, match="cannot be loaded: it does not begin as a GGUF file"):
        (tmp_path / "m.gguf").write_text("GGML")
        rt.plan("m.gguf")


@pytest.mark.parametrize("size", [0, "0", -1, "-3GiB", "0 GiB", "8GX", "1.5.2"])
def test_a_size_that_is_none_is_one_clear_error(rt, size):
    for act in (
        rt.plan,
        lambda size: rt.lease(size, purpose="drill"),
        lambda size: rt.register("m", backend="fake", size=size),
    ):
        with pytest.raises(BadSize) as error:
            act(size)
        assert repr(size) in str(error.value)


def test_a_model_of_another_process_is_found_in_the_book(runtime, shared_book):
    mine, other = runtime(ledger=shared_book), runtime(ledger=shared_book)
    fakes(other, qwen="8GiB", llama="4GiB")
    fakes(mine, gemma="1GiB")
    other.preload("qwen")
    plan = mine.plan("qwen")
    assert plan.granted and plan.steps == () and plan.because == "qwen is on sim:0 already."
    assert (plan.footprint.bytes, plan.footprint.parts[0].source) == (8 * GIB, "measured")
    other.evict("qwen")
    (step,) = mine.plan("qwen").steps
    assert isinstance(step, Move) and step.lease.endswith("/qwen")
    with pytest.raises(UnknownModel):
        mine.plan("mistral")
    loaded(runtime(ledger=shared_book), qwen="2GiB")
    with pytest.raises(AmbiguousName):
        mine.plan("qwen")


def test_a_model_that_another_process_has_not_loaded_has_its_declared_size(runtime, shared_book):
    mine, other = runtime(ledger=shared_book), runtime(ledger=shared_book)
    other.register("llama", backend="fake", size="14GiB", importance="high")
    loaded(mine, gemma="14GiB")
    plan = mine.plan("llama")
    assert (plan.footprint.bytes, plan.footprint.parts[0].source) == (14 * GIB, "declared")
    seen = mine.status()
    assert seen.declared[other._session.me] == {"llama": Declared(14 * GIB, 5)}
    owner = seen.sections[other._session.me].owner
    lease = Lease(owner.id, "llama")
    assert load_and_plan.of_lease(lease, owner, {}, Declared(GIB, 5)).wanted.importance == 5
    with pytest.raises(UnknownSize, match="has registered it without a size, and has not loaded"):
        load_and_plan.of_lease(lease, owner, {}, Declared(0, 5))


def test_a_size_with_a_layout_is_placed_as_a_model_of_that_size():
    """30 GiB fit on no single card, so the plan divides them. No command leases that, so it names none."""
    with Runtime(devices="sim:2x24GiB", ledger="memory:", monitor=False) as rt:
        assert not rt.plan("30GiB").granted
        found = rt.plan("30GiB", layout="balanced")
        assert {share.device for share in found.shares} == {"sim:0", "sim:1"}
        assert found.command == "" and rt.plan("2GiB").command == "2GiB"
        assert rt.plan("2GiB", devices="sim:1").shares[0].device == "sim:1"
        with pytest.raises(BadSetting, match="layout"):
            rt.plan("2GiB", layout="diagonal")


def test_the_reason_of_a_plan_with_an_eviction_says_only_once_what_the_model_needs(runtime):
    rt = fakes(runtime(monitor=False), llama="14GiB", qwen="14GiB")
    rt.preload("llama")
    because = rt.plan("qwen").because
    assert because.count("qwen needs") == 1
    assert because.endswith("Then sim:0 has 21.6 GiB free and would keep 7.6 GiB.")


def test_why_shows_what_may_leave_for_a_model_that_waits_or_would_be_loaded(rt):
    """It is the list of the plan. For a waiting model, the waiting request is the one that is planned."""
    loaded(rt, a="10 GiB", b="8 GiB", big="20 GiB")
    assert rt.why("b").leavers == rt.plan("b").leavers and rt.why("b")[0].action == "offloaded"
    assert [one.lease.split("/")[1] for one in rt.why("b").leavers] == ["a", "big"], (
        "RAM is short too"
    )
    assert not rt.why("big").leavers and not rt.why().leavers, "it is there; and no model is named"
    page = repr(render.shown("why", rt.why("b"), subject="b", around=rt.status()))
    assert page.splitlines()[-1].split()[:4] == ["→", "big", "model", "20.0"]
    rt.evict("big")
    rt.preload("a")
    go = threading.Event()
    with alongside(lambda: go.wait(PATIENCE) and rt.preload("big")), rt.use("b"):
        go.set()
        until(lambda: rt.status().tickets)
        found = rt.why("big")
        assert [(one.lease.split("/")[1], one.leaves) for one in found.leavers] == [("a", False)]
        assert "is in use" in rt.plan("big").because
    assert rt.here("big") and not rt.why("big").leavers
