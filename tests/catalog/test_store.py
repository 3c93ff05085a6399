"""The catalogue's files: a model is written once, and no reader sees a half-changed file."""

import argparse
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime import BadDocument, BadSetting, CatalogUnavailable, UnknownModel, verbs
from gpu_runtime.catalog import files as catalogs
from gpu_runtime.catalog.files import Catalog
from gpu_runtime.settings import Settings
from gpu_runtime.units import GIB
from gpu_runtime.verbs import fill
from tests.clock import scaled

ROOT = Path(__file__).parents[2]
DRILLS = """\
models:
  qwen3:8b: {backend: fake, memory: 14GiB}
  org/llama: {backend: fake, memory: 10GiB, importance: high}
"""


@pytest.fixture
def place(tmp_path):
    return tmp_path / "catalog"


@pytest.fixture
def catalog(place) -> Catalog:
    return Catalog(Settings.load(gpu_catalog=str(place)))


@pytest.fixture
def file(tmp_path):
    """Writes `text` as a file of models and returns its path."""

    def write(text: str, name: str = "models.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


# -- applying --------------------------------------------------------------------------------------


def test_applying_again_changes_only_the_models_that_differ(catalog, file):
    catalog.apply(file(DRILLS))
    done = catalog.apply(file(DRILLS.replace("14GiB", "15GiB")))
    assert (done.added, done.changed, done.unchanged) == ((), ("qwen3:8b",), ("org/llama",))
    before = os.stat(catalog.file).st_mtime_ns
    catalog.apply(file(DRILLS.replace("14GiB", "15GiB")))
    assert os.stat(catalog.file).st_mtime_ns == before


def test_several_files_are_applied_together_or_not_at_all(catalog, file):
    """`gpu apply -f a -f b` applied the last file only, and said nothing of the first."""
    one = file("models: {a: {backend: fake, memory: 1GiB}}", "a.yaml")
    two = file("models: {b: {backend: fake, memory: 1GiB}}", "b.yaml")
    applied = catalog.apply(one, two)
    assert (applied.added, applied.file) == (("a", "b"), f"{one}, {two}")
    models = "c: {backend: fake, memory: 1GiB}, b: {backend: fake, memory: 2GiB}"
    again = file(f"models: {{{models}}}", "c.yaml")
    with pytest.raises(BadDocument, match=r"c\.yaml, b: it is in .*b\.yaml already"):
        catalog.apply(two, again)
    assert [spec.name for spec in catalog.specs()] == ["a", "b"]
    parser = fill(argparse.ArgumentParser(), verbs.find("apply", "gpu").arguments)
    assert parser.parse_args(["-f", one, "-f", two]).file == [one, two]


def test_options_of_llama_cpp_stand_in_an_entry(catalog, file):
    """An error of the engine advised `n_batch`, and `apply` refused it. Another engine keeps it, and says so."""
    options = "n_batch: 2048, n_ubatch: 1024, n_threads: 4, type_k: q8_0, flash_attn: true, seed: 7"
    applied = catalog.apply(file(f"models: {{a: {{path: a.gguf, {options}}}}}"))
    assert not any("unknown" in note for note in applied.notes)
    numbers = {"n_batch": 2048, "n_ubatch": 1024, "n_threads": 4, "seed": 7}
    assert catalog.spec("a").options == numbers | {"cache_dtype": "q8_0", "flash_attn": True}
    with pytest.raises(BadDocument, match="n_batch: .*above 0"):
        catalog.apply(file("models: {a: {path: a.gguf, n_batch: 0}}"))
    done = catalog.apply(file("models: {b: {backend: fake, memory: 1GiB, n_batch: 8}}"))
    (note,) = [note for note in done.notes if "n_batch" in note]
    assert note == "b: kept, and not used by fake: n_batch" and not catalog.spec("b").options


def test_a_bad_document_changes_nothing_at_all(catalog, file):
    catalog.apply(file(DRILLS))
    before = catalog.file.read_bytes()
    bad = "models: {new: {memory: 1}}\n---\nmodels:\n  qwen3:8b:\n    memory: 3XB\n---\n"
    with pytest.raises(BadDocument) as caught:
        catalog.apply(file(bad + DRILLS))
    assert (caught.value.line, caught.value.field) == (5, "models.qwen3:8b.memory")
    assert catalog.file.read_bytes() == before


def test_a_note_on_several_models_appears_once(catalog, file):
    models = "a: {runtime: tgi, memory: 1}, b: {runtime: tgi, memory: 1, colour: red}"
    done = catalog.apply(file(f"models: {{{models}}}"))
    assert done.notes == (
        "a, b: planned, and not loaded here: this version has no backend tgi",
        "b: unknown here, and kept: colour",
    )


def test_a_chat_template_is_text_or_a_file_beside_the_one_that_names_it(catalog, file, tmp_path):
    """The file is read when the model is looked up, so that every engine gets the text. So is `thinking`."""
    (tmp_path / "brief.jinja").write_text("{{ messages[-1].content }}")
    a = "a: {backend: fake, memory: 1GiB, chat_template: brief.jinja, thinking: false}"
    b = 'b: {backend: fake, memory: 1GiB, chat_template: "{{ messages }}"}'
    catalog.apply(file(f"models: {{{a}, {b}}}"))
    specs = {spec.name: spec.options for spec in catalog.specs()}
    assert specs["a"] == {"chat_template": "{{ messages[-1].content }}", "thinking": False}
    assert specs["b"] == {"chat_template": "{{ messages }}"}


def test_paths_are_relative_to_their_file(catalog, file, tmp_path):
    models = "a: {path: sub/../a.gguf}, b: {path: /abs/b}, c: {source: ./c}, d: {source: org/d}"
    catalog.apply(file(f"models: {{{models}}}"))
    found = {"a": f"{tmp_path}/a.gguf", "b": "/abs/b", "c": f"{tmp_path}/c", "d": "org/d"}
    assert {spec.name: spec.source for spec in catalog.specs()} == found


def test_the_error_for_a_missing_file_names_it(catalog, tmp_path):
    with pytest.raises(BadDocument, match="cannot be read .No such file"):
        catalog.apply(tmp_path / "nothing.yaml")


words = st.text(alphabet="abcxyz/:.-_ é", min_size=1, max_size=12).map(str.strip).filter(bool)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=20)
nested = lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)
values = st.recursive(scalars, nested, max_leaves=6)
unknown = st.dictionaries(words.map("x-".__add__), values, max_size=3)
flags = st.sampled_from(["--seed=1", "--trust-remote-code", "--flag"])
written = st.fixed_dictionaries(
    {},
    optional={
        "memory": st.sampled_from(["10GB", "10GiB", "10G", 12345]),
        "gpu_layers": st.integers(-1, 80),
        "gpus": st.integers(1, 8) | st.just([0, 1]),
        "gpu_memory": st.sampled_from(["20GiB", {"0": "1GiB"}]),
        "layout": st.sampled_from(["balanced", "single"]),
        "dtype": st.just("half"),
        "importance": st.sampled_from(["high", 3]),
        "keep": st.booleans(),
        "keep_alive": st.sampled_from(["10m", 600, 0.5]),
        "type": st.just("chat"),
        "enabled": st.booleans(),
        "description": st.text(max_size=30),
        "gpu_fraction_factor": st.floats(0.5, 4),
        "runtime_args": st.lists(flags, max_size=3),
    },
)


@given(
    st.dictionaries(words, st.builds(dict.__or__, unknown, written), min_size=1, max_size=4),
    st.sampled_from(["yaml", "json"]),
)
def test_a_round_trip_loses_nothing(tmp_path_factory, models, form):
    here = tmp_path_factory.mktemp("trip")
    one, two = (Catalog(Settings.load(gpu_catalog=str(here / name))) for name in ("one", "two"))
    (here / "first.json").write_text(json.dumps({"models": models}))
    one.apply(here / "first.json")
    for name in models:
        (here / f"again.{form}").write_text(one.inspect(name, form))
        two.apply(here / f"again.{form}")
    assert {name: entry.body["spec"] for name, entry in two.entries().items()} == models
    assert one.specs() == two.specs()


# -- inspecting and deleting -----------------------------------------------------------------------
def test_inspect_returns_a_copy(catalog, file):
    catalog.apply(file(DRILLS))
    body = catalog.inspect("org/llama")
    assert body["spec"] == {"backend": "fake", "memory": "10GiB", "importance": "high"}
    body["spec"].clear()
    assert catalog.inspect("org/llama")["spec"]
    assert json.loads(catalog.inspect("org/llama", "json")) == catalog.inspect("org/llama")
    with pytest.raises(BadSetting, match="yaml or json"):
        catalog.inspect("org/llama", "toml")


def test_a_model_can_be_named_by_its_id(catalog, file):
    """The field `id` names a model, as in Helix. An id that two models share names neither of them."""
    models = "{name: a, id: Org/A, memory: 1}, {name: b, id: Org/B}, {name: c, id: Org/B}"
    catalog.apply(file(f"models: [{models}]"))
    assert catalog.spec("Org/A").name == "a" and catalog.spec("Org/B") is None


def test_a_deleted_model_is_gone_and_deleting_it_again_fails(catalog, file):
    catalog.apply(file(DRILLS))
    catalog.delete("qwen3:8b")
    assert list(catalog.entries()) == ["org/llama"]
    advice = "Known: org/llama.\n  Add it to the catalogue:  gpu apply -f FILE"
    with pytest.raises(UnknownModel, match=advice):
        catalog.delete("qwen3:8b")


# -- files -----------------------------------------------------------------------------------------
def test_files_written_by_hand_in_its_directory_are_read_and_never_written(catalog, place, file):
    place.mkdir()
    (place / "team.yaml").write_text(DRILLS)
    (place / "empty.yaml").write_text("# nothing yet\n")
    catalog.apply(file("models: {mine: {memory: 1}}"))
    assert list(catalog.entries()) == ["mine", "qwen3:8b", "org/llama"]
    for act in (lambda: catalog.delete("qwen3:8b"), lambda: catalog.apply(file(DRILLS))):
        with pytest.raises(CatalogUnavailable, match="team.yaml, which was written by hand"):
            act()
    assert (place / "team.yaml").read_text() == DRILLS
    (place / "team.yaml").write_text(DRILLS.replace("qwen3", "qwen4"))
    assert "qwen4:8b" in catalog.entries()


def test_a_name_in_two_files_of_the_directory_is_an_error_that_names_both(catalog, place):
    place.mkdir()
    for name in ("a.yaml", "b.yaml"):
        (place / name).write_text(DRILLS)
    with pytest.raises(CatalogUnavailable, match="a.yaml and .*b.yaml"):
        catalog.entries()


def test_a_hand_written_file_is_read_only_and_a_missing_one_is_created(tmp_path, file):
    by_hand = Catalog(Settings.load(gpu_catalog=file(DRILLS, "hand.yaml")))
    assert by_hand.spec("qwen3:8b").size == 14 * GIB
    with pytest.raises(CatalogUnavailable, match="written by hand, and is not overwritten"):
        by_hand.apply(file("models: {x: {memory: 1}}"))
    with pytest.raises(CatalogUnavailable, match="written by hand"):
        by_hand.delete("qwen3:8b")
    ours = Catalog(Settings.load(gpu_catalog=str(tmp_path / "ours.json")))
    ours.apply(file(DRILLS))
    ours.delete("qwen3:8b")
    assert list(ours.entries()) == ["org/llama"]


BAD_ENTRY = (
    b'{"gpu_console_catalog": 1, "models": [{"metadata": {"name": "a"}, "spec": {"gpus": -1}}]}'
)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"gpu_console_catalog": "x"}', BAD_ENTRY])
def test_a_damaged_catalogue_is_set_aside_by_the_next_apply(catalog, place, file, damage):
    catalog.apply(file(DRILLS))
    (place / "catalog.json").write_bytes(damage)
    with pytest.raises(CatalogUnavailable, match="is damaged .*\n  Apply your files again"):
        catalog.entries()
    done = catalog.apply(file(DRILLS))
    assert done.added == ("qwen3:8b", "org/llama") and "catalog.damaged-1" in done.notes[0]
    assert (place / "catalog.damaged-1").read_bytes() == damage and len(catalog.entries()) == 2


def test_a_newer_catalogue_is_neither_read_nor_overwritten(catalog, place, file):
    place.mkdir()
    (place / "catalog.json").write_text('{"gpu_console_catalog": 2, "models": []}')
    for act in (catalog.entries, lambda: catalog.apply(file(DRILLS))):
        with pytest.raises(CatalogUnavailable, match="a newer gpu-console wrote"):
            act()
    assert "catalog.damaged-1" not in os.listdir(place)


def test_a_failed_write_changes_nothing(catalog, file, monkeypatch):
    """The disk is full at the last moment of a write. The old catalogue stays as it is."""
    catalog.apply(file(DRILLS))
    before = catalog.file.read_bytes()
    full = lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    monkeypatch.setattr(catalogs.os, "fsync", full)
    with pytest.raises(CatalogUnavailable, match="No space left on device.; it is unchanged"):
        catalog.apply(file("models: {x: {memory: 1}}"))
    assert catalog.file.read_bytes() == before
    assert not list(catalog.directory.glob(".catalog.json-*"))


def test_a_reader_finds_the_old_file_or_the_new_one(catalog, place, file, monkeypatch):
    catalog.apply(file(DRILLS))
    seen = []

    def look_then_replace(draft, path, replace=os.replace):
        seen.append(list(Catalog(Settings.load(gpu_catalog=str(place))).entries()))
        replace(draft, path)

    monkeypatch.setattr(catalogs.os, "replace", look_then_replace)
    catalog.apply(file("models: {x: {memory: 1}}"))
    assert seen == [["org/llama", "qwen3:8b"]] and "x" in catalog.entries()


def test_waiting_too_long_for_the_lock_is_an_error(catalog, file, monkeypatch):
    catalog.apply(file(DRILLS))
    monkeypatch.setattr(catalogs, "PATIENCE_SECONDS", 0.05)
    locked = pytest.raises(CatalogUnavailable, match="fuser -v .*catalog.lock")
    with open(catalog.directory / "catalog.lock", "rb+") as held, locked:
        fcntl.flock(held, fcntl.LOCK_EX)
        catalog.apply(file(DRILLS))


def test_the_file_is_private_unless_its_directory_is_shared(catalog, place, file):
    catalog.apply(file(DRILLS))
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(catalog.file.stat().st_mode) == 0o600
    catalog.file.chmod(0o664)
    catalog.apply(file("models: {x: {memory: 1}}"))
    assert stat.S_IMODE(catalog.file.stat().st_mode) == 0o664


def test_by_default_it_is_in_the_state_directory(environment, tmp_path):
    environment.setenv("XDG_STATE_HOME", str(tmp_path))
    assert Catalog(Settings.load()).file == tmp_path / "gpu-console" / "catalog" / "catalog.json"


APPLY = """
import sys
from gpu_runtime.catalog.files import Catalog
from gpu_runtime.settings import Settings
catalog = Catalog(Settings.load())
for number in range(6):
    name = f"{sys.argv[1]}-{number}"
    open(f"{sys.argv[2]}/{name}.yaml", "w").write(f"models: {{{name}: {{memory: 1GiB}}}}")
    catalog.apply(f"{sys.argv[2]}/{name}.yaml")
    if number % 3 == 2:
        catalog.delete(name)
"""


@pytest.mark.processes
def test_concurrent_applies_of_several_processes_lose_nothing(catalog, place, tmp_path):
    environment = {**os.environ, "GPU_CATALOG": str(place), "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen([sys.executable, "-c", APPLY, who, str(tmp_path)], env=environment)
        for who in "abcd"
    ]
    assert [racer.wait(scaled(120)) for racer in racers] == [0] * 4
    kept = {f"{who}-{number}" for who in "abcd" for number in (0, 1, 3, 4)}
    assert set(catalog.entries()) == kept


# -- threads ---------------------------------------------------------------------------------------
class ReadByTwo(Catalog):
    """A second thread, which read the files before the last change, always stores its entries last."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value if name != "_known" else (None, {}))


def test_a_slower_reader_does_not_replace_the_entries_of_a_faster_one(file):
    catalog = ReadByTwo(Settings.load(gpu_catalog=file(DRILLS)))
    assert [*catalog.entries()] == ["qwen3:8b", "org/llama"]
