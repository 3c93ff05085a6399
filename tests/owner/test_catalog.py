"""The catalogue in a runtime: a model is written once and used by name."""

import json

import pytest

from gpu_runtime import (
    AlreadyRegistered,
    BadDocument,
    BadSize,
    CatalogUnavailable,
    GpuError,
    LoadFailed,
    ModelDisabled,
    NotLoaded,
    UnknownDevice,
    UnknownModel,
)
from gpu_runtime.catalog.fields import KNOWN
from gpu_runtime.facts.book import decode_book, encode
from gpu_runtime.units import GIB

from .conftest import claims, fakes, where

DRILLS = """\
models:
  qwen3:8b: {backend: fake, memory: 14GiB}
  org/llama: {backend: fake, memory: 10GiB, importance: high}
"""


@pytest.fixture
def place(tmp_path):
    return tmp_path / "catalog"


@pytest.fixture
def file(tmp_path):
    """Writes `text` as a file of models and returns its path."""

    def write(text: str, name: str = "models.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# -- in a runtime ----------------------------------------------------------------------------------
@pytest.fixture
def shelf(runtime, place, file):
    """Makes runtimes that share one catalogue, which contains the models of `text`."""

    def make(text: str = DRILLS, **settings):
        rt = runtime(catalog=str(place), **settings)
        if text:
            rt.apply(file(text))
        return rt

    return make


def test_a_catalogued_model_is_used_by_name_without_registering_it(shelf):
    rt = shelf()
    for name in ("qwen3:8b", "org/llama"):
        with rt.use(name) as model:
            assert repr(model) == f"<fake {name} on sim:0>"
    assert where(rt) == {"qwen3:8b": "host", "org/llama": "sim:0"}
    assert {lease.name: lease.importance for lease in rt.status().leases()}["org/llama"] == 5


def test_every_verb_knows_a_catalogued_model_before_it_is_loaded(shelf):
    rt = shelf()
    assert rt.plan("qwen3:8b").footprint.bytes == 14 * GIB and rt.plan("qwen3:8b").granted
    rt.models()
    assert rt.specs() == () and rt.status().sections == {}, "reading registers no model"
    assert rt.why("qwen3:8b") == () and rt.evict("org/llama").because == "org/llama is not loaded"
    assert rt.pin("org/llama").done and rt.preload("org/llama").done
    assert claims(rt) == {"sim:0": 10 * GIB}


def test_models_lists_the_catalogue_once_and_as_on_disk(shelf, shared_book):
    one, two = shelf(ledger=shared_book), shelf("", ledger=shared_book)
    one.preload("org/llama")
    two.register("own", backend="fake", size="1GiB")
    frame = two.models()
    places = dict(zip(frame["name"], frame["where"], strict=True))
    assert places == {"own": "disk", "org/llama": "sim:0", "qwen3:8b": "disk"}
    assert list(frame["owner"][[0, 2]]) == ["me", "catalogue"] and frame["bytes"][2] == 14 * GIB


def test_a_change_takes_effect_at_the_next_load(shelf, file):
    rt = shelf()
    rt.preload("qwen3:8b")
    rt.apply(file(DRILLS.replace("14GiB", "12GiB")))
    rt.preload("qwen3:8b")
    assert claims(rt) == {"sim:0": 14 * GIB}
    rt.forget("qwen3:8b")
    rt.preload("qwen3:8b")
    assert claims(rt) == {"sim:0": 12 * GIB}


def test_a_change_of_a_model_that_is_not_loaded_takes_effect_at_once(shelf, file):
    rt = shelf()
    rt.pin("org/llama")
    rt.apply(file(DRILLS.replace("10GiB", "9GiB")))
    rt.preload("org/llama")
    assert claims(rt) == {"sim:0": 9 * GIB}


def test_a_deleted_model_stays_loaded_until_it_is_evicted(shelf):
    rt = shelf()
    rt.preload("qwen3:8b")
    told = rt.delete("qwen3:8b").because
    assert "no longer in the catalogue" in told and "has it loaded" in told
    with rt.use("qwen3:8b"):
        pass
    rt.forget("qwen3:8b")
    with pytest.raises(UnknownModel), rt.use("qwen3:8b"):
        pass


def test_a_model_deleted_before_its_load_is_unknown(shelf):
    rt = shelf()
    rt.pin("qwen3:8b")
    rt.delete("qwen3:8b")
    with pytest.raises(UnknownModel, match="Known: org/llama"):
        rt.preload("qwen3:8b")


def test_a_registration_overrides_the_catalogue(shelf):
    rt = shelf()
    fakes(rt, **{"qwen3:8b": "2GiB"})
    rt.preload("qwen3:8b")
    assert claims(rt) == {"sim:0": 2 * GIB}
    rt.preload("org/llama")
    with pytest.raises(AlreadyRegistered):
        fakes(rt, **{"org/llama": "2GiB"})
    rt.forget("org/llama")
    fakes(rt, **{"org/llama": "3GiB"})


@pytest.mark.parametrize(("fields", "error", "why", "state"), [
    ("backend: fake, enabled: false", ModelDisabled, "is disabled in the catalogue", "disabled"),
    ("runtime: ollama", LoadFailed, "there is no command ollama here", "ollama is not installed"),
    ("runtime: tgi", LoadFailed, "its backend tgi is not part of this version", "no backend tgi here"),
    ("runtime: tensorrt", LoadFailed, "its backend tensorrt is not part of this version",
     "no backend tensorrt here"),
])  # fmt: skip
def test_a_model_that_cannot_be_loaded_is_planned_and_nothing_is_evicted_for_it(
    shelf, monkeypatch, fields, error, why, state
):
    monkeypatch.setattr("shutil.which", lambda name: None)
    rt = shelf(DRILLS + f"  far: {{{fields}, memory: 20GiB}}\n")
    rt.preload("qwen3:8b")
    plan = rt.plan("far")
    assert plan.footprint.bytes == 20 * GIB and why in plan.obstacle
    with pytest.raises(error, match=why):
        rt.preload("far")
    assert where(rt)["qwen3:8b"] == "sim:0"
    assert rt.catalog().set_index("name")["state"]["far"] == state


def test_a_model_of_unknown_size_needs_a_declared_one(shelf):
    """The error names the model's missing file, not the cache's size, which only the file's header would give."""
    with pytest.raises(BadSize, match="there is no .*phi.gguf.*\n.*memory: 8GiB  in the catalogue"):
        shelf("models: {phi: {path: phi.gguf, context_length: 16384}}").plan("phi")


def test_its_cards_are_named_by_index_or_id_and_must_exist(shelf):
    cards = {"a": "1", "b": "'sim:1'", "c": "7"}
    models = (f"{name}: {{backend: fake, memory: 1GiB, gpus: [{cards[name]}]}}" for name in cards)
    rt = shelf(f"models: {{{', '.join(models)}}}", devices="sim:2x24GiB,host:64GiB")
    for name in "ab":
        assert rt.preload(name).where == "sim:1"
    with pytest.raises(UnknownDevice, match="7"):
        rt.preload("c")


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ("memory: 3GiB", {"sim:0": 3}),
        ("memory: 3GiB, gpus: [2]", {"sim:2": 3}),
        ("memory: 40GiB", {"sim:0": 20, "sim:1": 20}),
        ("memory: 30GiB, max_tensor_parallel: 1", {}),
        ("memory: 10GiB, gpus: 2, layout: balanced", {"sim:0": 5, "sim:1": 5}),
        ("memory: 10GiB, gpu_memory: 6GiB", {"sim:0": 5, "sim:1": 5}),
        (
            "memory: 9GiB, gpu_memory: {1: 6GiB, 2: 6GiB}, layout: balanced",
            {"sim:1": 4.5, "sim:2": 4.5},
        ),
        ("memory: 3GiB, gpu_fraction_factor: 3", {"sim:0": 9}),
        ("memory: 3GiB, gpu_fraction_factor: 3, fraction_largest_possible: 0.3", {"sim:0": 21.6}),
        ("memory: 3GiB, layout: whole", {"sim:0": 21.6}),
    ],
)
def test_the_fields_of_placement_decide_its_cards(shelf, fields, shares):
    """Each case is one override on three cards of 21.6 GiB. If no shares are expected, the plan is refused."""
    rt = shelf(f"models: {{m: {{backend: fake, {fields}}}}}", devices="sim:3x24GiB,host:64GiB")
    planned = {share.device: share.bytes / GIB for share in rt.plan("m").shares}
    assert planned == pytest.approx(shares, abs=0.01)


def test_an_unreadable_catalogue_fails_only_requests_that_need_it(shelf, place, caplog):
    rt = shelf()
    fakes(rt, own="1GiB")
    (place / "catalog.json").write_text("{")
    with rt.use("own"):
        pass
    assert list(rt.models()["name"]) == ["own"] and "damaged" in caplog.text
    with pytest.raises(CatalogUnavailable), rt.use("qwen3:8b"):
        pass


def test_a_command_does_not_load_a_model_that_would_end_with_it(shelf, shared_book):
    rt, command = shelf(ledger=shared_book), shelf("", ledger=shared_book)
    command.guest = True
    with pytest.raises(NotLoaded, match="%gpu load qwen3:8b"):
        command.preload("qwen3:8b")
    assert command.plan("qwen3:8b").granted
    rt.preload("qwen3:8b")
    assert "is on sim:0" in command.preload("qwen3:8b").because


# -- any value of any field --------------------------------------------------------------------------

STRANGE = (
    None, True, 0, -1, 3.5, 1e308, 2**62, -(2**62), "", " ", "yes", "\udcff", "a\0b", "\x1b[31m", "a\nb",
    "x" * 10**5, "9" * 5000, [], {}, [None], ["\udcff"], {"0": None}, {"a\udcff": 1}, [[1]], "8GiB", "0",
    ["--max-model-len", "9" * 12], ["--quantization", "x" * 10**5], ["-ngl", "9" * 20], {"seed": "a\0b"},
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("field", sorted({*KNOWN, "x-own"}))
def test_any_value_of_a_field_is_an_error_or_a_lawful_book(runtime, tmp_path, field):
    file = tmp_path / "models.json"
    for value in STRANGE:
        rt = runtime(catalog=str(tmp_path / "catalog"), monitor=False)
        spec = {"backend": "fake", "memory": "1GiB", field: value}
        file.write_text(json.dumps({"models": {"a": spec}}))
        try:
            rt.apply(file)
            rt.preload("a")
        except GpuError as error:
            assert str(error).replace("\n", "").isprintable()
            assert 0 < len(str(error)) <= 1500
        book = rt._session.ledger.read()
        assert decode_book(encode(book)) == book
        rt.close()


@pytest.mark.parametrize("name", ["\udcff", "a\0", "x" * 10**5, "a@b", " a", ""])
def test_any_name_is_an_error_or_a_lawful_book(runtime, tmp_path, name):
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"models": {name: {"backend": "fake", "memory": "1GiB"}}}))
    with pytest.raises(BadDocument) as error:
        runtime(catalog=str(tmp_path / "catalog")).apply(file)
    assert len(str(error.value)) <= 1500


def test_a_model_whose_file_does_not_exist_is_not_ready(shelf, tmp_path):
    """`gpu catalog` called it ready, and the plan gave a command that would have failed."""
    weights = tmp_path / "weights.gguf"
    rt = shelf(f"models: {{gone: {{path: {weights}, size: 1GiB}}}}\n")
    assert rt.catalog()["state"].tolist() == ["not found"]
    plan = rt.plan("gone")
    assert plan.granted and plan.obstacle == f"there is no {weights}"
    weights.touch()
    assert rt.catalog()["state"].tolist() == ["ready"]
