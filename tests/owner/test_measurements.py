"""Measurements of models outlast a reboot and count only for the same source. They never cause an error."""

import fcntl
import os

import pytest
from msgspec.structs import replace

from gpu_runtime.facts import Declared, Evidence, Level, Measurement, ModelSpec, Sample
from gpu_runtime.telemetry import measurements
from gpu_runtime.telemetry.measurements import Measurements
from gpu_runtime.units import GIB, MIB
from tests import tiny_models

from .conftest import fakes, loaded

SPEC = ModelSpec("qwen", "transformers", "/models/qwen", options={"dtype": "bfloat16"})
EVIDENCE = Evidence(100, "safetensors header", fingerprint="as it was")
SEEN = Measurement(90, 120, "2026-11-21", "NVIDIA H100", "qwen")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger" / "measured.json"


def test_it_is_remembered_by_the_next_process(path):
    Measurements(path).remember(SPEC, EVIDENCE, SEEN)
    Measurements(path).remember_context("NVIDIA H100", 420 * MIB)
    fresh = Measurements(path)
    assert fresh.of(SPEC, EVIDENCE) == SEEN and fresh.context_bytes("NVIDIA H100") == 420 * MIB
    assert set(os.listdir(path.parent)) == {"measured.json", "measured.lock"}


@pytest.mark.parametrize(
    ("spec", "evidence"),
    [
        (SPEC, replace(EVIDENCE, fingerprint="changed since")),
        (replace(SPEC, options={"dtype": "float32"}), EVIDENCE),
        (replace(SPEC, source="/models/other"), EVIDENCE),
        (replace(SPEC, backend="llama_cpp"), EVIDENCE),
        (replace(SPEC, model_type="reranker"), EVIDENCE),
        (replace(SPEC, quantization="int8"), EVIDENCE),
    ],
    ids=["file", "dtype", "source", "backend", "type", "quantization"],
)
def test_another_source_or_another_way_to_load_it_is_another_model(path, spec, evidence):
    known = Measurements(path)
    known.remember(SPEC, EVIDENCE, SEEN)
    assert known.of(spec, evidence) is None


@pytest.mark.parametrize(
    "change",
    [
        dict(name="other"),
        dict(importance=1),
        dict(keep=True),
        dict(options={"dtype": "bfloat16", "context_length": 8192}),
    ],
)
def test_how_it_is_called_and_used_makes_no_difference(path, change):
    known = Measurements(path)
    known.remember(SPEC, EVIDENCE, SEEN)
    assert known.of(replace(SPEC, **change), EVIDENCE) == SEEN
    if "options" in change:  # an engine that allocates its cache at load takes other bytes
        at_load = replace(EVIDENCE, at_load=True)
        known.remember(SPEC, at_load, SEEN)
        assert known.of(replace(SPEC, **change), at_load) is None


def test_processes_see_what_the_other_one_has_just_written(path):
    """Neither a write nor a read goes by what was in the file before, although its size is the same."""
    both = [Measurements(path) for _ in range(2)]
    for turn in range(6):
        writer, reader = both[turn % 2], both[1 - turn % 2]
        writer.remember_cell("cell", {"sim:0": 100 + turn, "sim:1": 1})
        writer.remember_context(f"card {turn % 3}", 400 + turn)
        assert reader.cell_bytes("cell") == {"sim:0": 100 + turn, "sim:1": 1}
    assert [reader.context_bytes(f"card {number}") for number in range(3)] == [403, 404, 405]
    reader.cell_bytes("cell").clear()  # the caller's own copy
    assert reader.cell_bytes("cell")
    writer.remember_cell("cell", {})
    assert reader.cell_bytes("cell") == writer.cell_bytes("cell") == {}


def test_a_source_that_cannot_be_told_from_another_is_not_remembered(path):
    known = Measurements(path)
    known.remember(SPEC, replace(EVIDENCE, fingerprint=""), SEEN)
    assert not path.exists() and known.of(SPEC, replace(EVIDENCE, fingerprint="")) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"models": {"a": {"resident_bytes": "many"}}}', b"\x00" * 99]
)
def test_a_damaged_file_is_ignored_with_a_warning_and_mended(path, content, caplog):
    path.parent.mkdir()
    path.write_bytes(content)
    known = Measurements(path)
    assert known.of(SPEC, EVIDENCE) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is damaged" in caplog.text
    known.remember(SPEC, EVIDENCE, SEEN)
    assert Measurements(path).of(SPEC, EVIDENCE) == SEEN


def test_a_file_too_large_to_be_ours_is_not_read(path, caplog):
    path.parent.mkdir()
    path.write_bytes(b" " * (measurements.LONGEST + 1))
    assert Measurements(path).of(SPEC, EVIDENCE) is None and "too large" in caplog.text


def test_where_it_cannot_be_written_it_is_remembered_in_this_process(tmp_path, caplog):
    """The file cannot be written: the disk is full, or a file has the directory's name. This is logged once."""
    (tmp_path / "file").write_text("")
    known = Measurements(tmp_path / "file" / "measured.json")
    for _ in range(2):
        known.remember(SPEC, EVIDENCE, SEEN)
    assert known.of(SPEC, EVIDENCE) == SEEN
    assert caplog.text.count("is remembered in this process only") == 1


def test_a_process_that_is_stopped_while_it_writes_holds_nobody_up(path, caplog):
    Measurements(path).remember(SPEC, EVIDENCE, SEEN)
    with path.with_suffix(".lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        known = Measurements(path)
        known.remember(SPEC, EVIDENCE, replace(SEEN, resident_bytes=91))
        assert "cannot be written" in caplog.text
    known.remember(SPEC, EVIDENCE, replace(SEEN, resident_bytes=92))
    assert Measurements(path).of(SPEC, EVIDENCE).resident_bytes == 92


def test_a_lock_that_stays_held_is_told_once_and_waited_for_once(path, monkeypatch, caplog):
    """Each cell of a notebook may write. The next warning comes after a write that succeeded."""
    store, asked = Measurements(path), []
    lock_within = measurements.lock_within
    monkeypatch.setattr(
        measurements,
        "lock_within",
        lambda fd, seconds: lock_within(fd, asked.append(seconds) or 0.0),
    )
    store.remember_cell("first", {"sim:0": 1})
    for _ in range(2):
        with path.with_suffix(".lock").open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for key in ("a", "b", "c"):
                store.remember_cell(key, {"sim:0": 1})
        assert len(caplog.records) == 1
        store.remember_cell("d", {"sim:0": 1})
        caplog.clear()
    patience = measurements.PATIENCE_SECONDS
    assert asked == [patience, *[patience, 0.0, 0.0, 0.0] * 2]


def test_what_is_written_while_the_lock_is_waited_for_stays(path, monkeypatch):
    mine, other = (Measurements(path) for _ in range(2))
    lock_within = measurements.lock_within

    def late(fd, seconds):
        monkeypatch.undo()
        other.remember_cell("theirs", {"sim:0": 2})
        lock_within(fd, seconds)

    monkeypatch.setattr(measurements, "lock_within", late)
    mine.remember_cell("mine", {"sim:0": 1})
    known = Measurements(path)
    assert (known.cell_bytes("mine"), known.cell_bytes("theirs")) == ({"sim:0": 1}, {"sim:0": 2})


def test_the_file_does_not_grow_without_end(path, monkeypatch):
    """The file keeps a limited number of measurements. The one that was written longest ago is removed first."""
    monkeypatch.setattr(measurements, "KEPT", 3)
    known = Measurements(path)
    for number in (1, 2, 3, 1, 4):
        known.remember(replace(SPEC, source=f"/{number}"), EVIDENCE, SEEN)
    gone = [n for n in (1, 2, 3, 4) if known.of(replace(SPEC, source=f"/{n}"), EVIDENCE) is None]
    assert gone == [2]
    for number in (1, 2, 3):
        known.remember_cell(f"cell {number}", {"sim:0": number})
    known.remember_cell("a cell that took nothing", {})
    assert known.cell_bytes("cell 1") == {"sim:0": 1}


# -- from a load to the next estimate -----------------------------------------------------------------------------
@pytest.fixture
def box(runtime, tmp_path):
    """Each call opens a runtime on the same ledger file, as the user's next kernel would."""
    return lambda: runtime(
        devices="sim:64MiB,host:64MiB",
        ledger=f"keeper://{tmp_path}/ledger",
        wall=lambda: 1_795_000_000.0,
    )


def weights(plan):
    return plan.footprint.parts[0].source, plan.footprint.parts[0].detail


def test_the_next_kernel_goes_by_what_the_first_one_measured(box, tmp_path):
    """Until the model's files change, the plan names the earlier measurement as its source."""
    directory = tiny_models.causal_lm(tmp_path / "writer")
    with box() as rt:
        rt.register("writer", directory)
        assert weights(rt.plan("writer")) == ("safetensors header", "")
        rt.preload("writer")
        table = rt.leases()
        held = table[table["device"] == "sim:0"]["bytes"].sum()  # its shadow is in host memory
    rt = box()
    rt.register("scribe", directory)
    plan = rt.plan("scribe")
    assert weights(plan) == ("measured", "after it was loaded on 2026-11-18")
    assert plan.footprint.bytes == held
    tiny_models.causal_lm(directory, size="2 MiB")
    plan = rt.plan("scribe")
    assert weights(plan) == ("safetensors header", "") and plan.footprint.bytes > 2 * held


def test_however_its_path_is_written_it_is_the_same_model(box, tmp_path, monkeypatch):
    directory = tiny_models.causal_lm(tmp_path / "models" / "writer")
    rt = box()
    rt.register("writer", directory)
    rt.preload("writer")
    monkeypatch.chdir(tmp_path)
    assert weights(rt.plan("models/writer"))[0] == "measured"


def test_what_a_factory_made_is_known_again_by_its_own_registration_alone(box):
    """A live Python object has no fingerprint, so another registration does not get its measurement."""
    import torch

    rt = box()
    rt.register("net", lambda: torch.nn.Linear(64, 64))
    rt.register("twin", lambda: torch.nn.Linear(64, 64))
    rt.preload("net")
    assert weights(rt.plan("net"))[0] == "measured" and weights(rt.plan("twin"))[0] == "shapes"


# -- the free room of each device in a snapshot ----------------------------------------------------
def test_a_snapshot_tells_what_a_grant_may_spend_and_by_which_rules(runtime):
    rt = runtime(devices="sim:20GiB,host:64GiB", gpu_memory_max_percent=0.9, monitor=False)
    loaded(rt, qwen="8GiB")
    card = rt.status().devices[0]
    assert card.room_bytes == card.limit_bytes - 8 * GIB and card.blind == ""
    assert rt.status().rules.high == 0.80


def test_room_that_cannot_be_seen_is_unknown_and_says_why(runtime, monkeypatch):
    """The driver of this card does not answer. So the room is shown neither as zero nor as free."""
    rt = runtime(monitor=False)
    devices = tuple(
        device if device.is_host else type(device)("cuda:0", device.total_bytes, "card", "GPU-1")
        for device in rt.probe.devices
    )
    monkeypatch.setattr(rt.probe, "devices", devices)
    monkeypatch.setattr(
        rt.probe, "samples", lambda now, fresh=False: {"cuda:0": Sample("cuda:0", now, None)}
    )
    rt._session.limits["cuda:0"] = rt._session.limits["sim:0"]
    card = rt.status().devices[0]
    assert card.room_bytes is None
    assert card.blind == "the driver of cuda:0 does not say how much memory is free"


def test_health_counts_all_cards_and_names_the_fullest(runtime):
    rt = runtime(devices="sim:2x10GiB,host:64GiB", gpu_memory_max_percent=1.0)
    for number, size in enumerate(("1GiB", "9GiB")):
        rt.register(f"m{number}", backend="fake", size=size, devices=(f"sim:{number}",))
        rt.preload(f"m{number}")
    found = rt.health()
    expected = (50.0, "sim:1 90 %", Level.CRITICAL)
    assert (found.used_percent, found.fullest, found.pressure) == expected


def test_what_this_process_can_load_is_shown_as_it_is_now(runtime):
    """Other processes read what was published at the last tick."""
    rt = fakes(runtime(), m="1GiB")
    rt.load("m", size="2GiB")
    assert rt.status().declared[rt._session.me] == {"m": Declared(2 * GIB, 10)}
