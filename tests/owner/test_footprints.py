"""The memory of models, as measured when they are loaded and used, on cards whose figures the test sets."""

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gpu_runtime import other_libraries
from gpu_runtime.errors import LoadFailed, UnknownSize
from gpu_runtime.estimation import CONTEXT_BYTES
from gpu_runtime.facts import HOST, Device, Evidence, Lease, ModelSpec, Share
from gpu_runtime.owner.sizing import Sizing
from gpu_runtime.telemetry.measurements import Measurements
from gpu_runtime.units import GIB, MIB

CARDS = tuple(Device(f"cuda:{n}", 80 * GIB, "NVIDIA H100") for n in range(2))
CARDS += (Device(HOST, 64 * GIB),)
CONFIG = dict(architectures=["LlamaForCausalLM"], torch_dtype="bfloat16", num_hidden_layers=32)
CONFIG |= dict(num_attention_heads=32, num_key_value_heads=8)
CONFIG |= dict(hidden_size=4096, intermediate_size=14336)
HEADER = Evidence(10 * GIB, "safetensors header", fingerprint="f", config=CONFIG)


class Box:
    """A probe and a backend whose results the test sets."""

    def __init__(self, devices=CARDS):
        self.devices, self.held, self.context, self.beyond = devices, {}, {}, {}
        self.taken_at = 0.0  # when the driver was measured
        self.evidence_, self.handle = HEADER, None
        fields = dict(origin=None, handle=None, measured=None, backend=self, pieces=tuple)
        self.resident = SimpleNamespace(spec=ModelSpec("qwen", "transformers", "/qwen"), **fields)
        self.sizing = Sizing(Measurements(), self, wall=lambda: 1_795_000_000.0)

    used = property(lambda self: lambda: self.held)
    contexts = property(lambda self: lambda: self.context)

    @property
    def cards(self):
        return [device for device in self.devices if not device.is_host]

    def measured_at(self, device):
        return self.taken_at

    def look(self, mebibytes, *models):
        """A tick of the monitor, which sees a context of so many MiB."""
        self.context = {"cuda:0": mebibytes * MIB}
        self.sizing.saw_contexts(models)

    def beyond_now(self, device):
        return self.beyond.get(device)

    def evidence(self, spec, origin):
        if isinstance(self.evidence_, Exception):
            raise self.evidence_
        return self.evidence_

    def measure(self, handle):
        return handle

    def working_bytes(self, handle):
        return None

    def load(self, gib, device="cuda:0"):
        self.resident.handle = (Share(device, int(gib * GIB)),)
        self.sizing.learn(self.resident, self.resident.handle)

    def unload(self):
        self.resident.handle = None

    def parts(self, *places):
        return [
            (part.name, part.bytes, part.source)
            for part in self.sizing.footprint(self.resident, places).parts
        ]


@pytest.fixture
def box():
    return Box()


WEIGHTS = ("weights", 10 * GIB, "safetensors header")


def test_the_first_model_of_a_process_on_a_card_brings_the_context(box):
    """It counts once for each process and card, first with the model and later with the other memory."""
    assert box.parts() == [WEIGHTS, ("context", CONTEXT_BYTES, "typical")]
    box.held = {"cuda:0": 500 * MIB, HOST: 9 * GIB}
    assert box.parts() == [WEIGHTS] == box.parts("cuda:0")
    assert box.parts("cuda:1") == [WEIGHTS, ("context", CONTEXT_BYTES, "typical")]


def test_a_context_is_that_of_the_worst_allowed_card_and_an_engine_brings_its_own(box):
    box.devices = (Device("cuda:0", GIB, "small"), Device("cuda:1", GIB, "large"))
    for name, size in (("small", 300 * MIB), ("large", 500 * MIB)):
        box.sizing.measurements.remember_context(name, size)
    context = lambda *places: [size for name, size, _ in box.parts(*places) if name == "context"]
    assert [context(), context("cuda:0")] == [[500 * MIB], [300 * MIB]]
    box.held = {"cuda:0": 1}
    assert [context(), context("cuda:1")] == [[], [500 * MIB]]
    box.evidence_ = replace(HEADER, at_load=True)
    assert context("cuda:0") == [300 * MIB]


def test_simulated_cards_have_no_context():
    assert Box((Device("sim:0", GIB, simulated=True),)).parts() == [WEIGHTS]


def test_a_context_is_believed_when_two_looks_agree(box):
    """The driver's figures are late, and wrong during a load. So two equal ones in a row count."""
    first = CONTEXT_BYTES
    for seen, expected in ((130, first), (420, first), (420, 420 * MIB), (0, 420 * MIB)):
        box.taken_at += 1.0
        box.look(seen)
        assert box.parts()[1][1] == expected
    assert box.parts()[1] == ("context", 420 * MIB, "measured")


def test_two_looks_at_one_measurement_do_not_make_a_context(box):
    """After a release, torch's figure is new and the driver's is old: what was released looked like a context."""
    box.taken_at = 1.0
    for seen in (420, 9_000, 9_000):
        box.look(seen)
    box.taken_at = 2.0
    box.look(420)
    assert box.parts()[1] == ("context", 420 * MIB, "measured")


@pytest.mark.parametrize("backend, learns", [("torch", True), ("llama_cpp", False)])
def test_the_bytes_of_another_allocator_are_no_context(box, backend, learns):
    """Every later load on a card of this kind reserved the 8 GiB of a llama.cpp model in this process too."""
    model = Lease("1.2.3", "m", shares=(Share("cuda:0", 8 * GIB),), backend=backend)
    for box.taken_at in (1.0, 2.0):
        box.look(420, model)
    assert (box.parts()[1][1] == 420 * MIB) is learns


def test_what_another_library_holds_is_no_context(box, monkeypatch):
    monkeypatch.setattr(
        other_libraries, "held", lambda: [other_libraries.Held("jax", "arrays", "")]
    )
    for box.taken_at in (1.0, 2.0):
        box.look(9_000)
    assert box.parts()[1][1] == CONTEXT_BYTES


def test_what_was_measured_counts_once_it_is_not_loaded_any_more(box):
    box.held = {"cuda:0": 1, "cuda:1": 1}
    box.load(9.5)
    box.unload()
    found = box.sizing.footprint(box.resident)
    assert found.bytes == 9.5 * GIB
    assert found.parts[0].detail == "after it was loaded on NVIDIA H100 on 2026-11-18"


def peak(box):
    box.held = {"cuda:0": 1, "cuda:1": 1}
    known = box.sizing.measurements.of(box.resident.spec, HEADER)
    return None if known.peak_bytes is None else known.peak_bytes / GIB


def test_a_peak_that_nothing_tells_is_unknown(box):
    """Without a measured peak, the peak is unknown: neither zero nor the resident bytes."""
    box.load(9.5)
    assert peak(box) is None
    assert not any("peak" in note for note in box.sizing.footprint(box.resident).notes)


def test_a_higher_peak_in_use_is_remembered_where_no_other_model_was_used(box):
    """If another model was used meanwhile, torch's peak could be that one's. Larger storages always count."""
    box.beyond = {"cuda:0": 1 * GIB}
    box.load(9)
    box.beyond = {"cuda:0": 4 * GIB}
    box.sizing.saw(box.resident, alone=False)
    assert peak(box) == 10
    box.sizing.saw(box.resident, alone=True)
    assert peak(box) == 13
    box.resident.handle = (Share("cuda:0", 20 * GIB),)
    box.sizing.saw(box.resident, alone=False)
    assert peak(box) == 20
    box.unload()
    found = box.sizing.footprint(box.resident)
    assert found.bytes == 9 * GIB
    assert "At its peak it took 20.0 GiB, measured on 2026-11-18." in found.notes


def test_a_lower_peak_of_a_later_load_does_not_hide_a_higher_one(box):
    box.beyond = {"cuda:0": 4 * GIB}
    box.load(9)
    box.beyond = {"cuda:0": 0}
    box.load(9)
    assert peak(box) == 13


def test_a_loaded_model_is_as_large_as_it_is_and_keeps_its_room_for_use(box):
    """Once a model is loaded, its declared size does not matter. Its source may even be deleted."""
    box.resident.spec = ModelSpec("qwen", "transformers", "/qwen", size=20 * GIB)
    box.load(9)
    assert box.parts() == [("weights", 9 * GIB, "measured")]
    box.resident.spec = ModelSpec(
        "qwen", "transformers", "/qwen", size=20 * GIB, options=dict(context_length=8192)
    )
    assert box.parts() == [("weights", 9 * GIB, "measured"), ("room", 11 * GIB, "declared")]
    box.resident.spec = ModelSpec(
        "qwen", "transformers", "/qwen", options=dict(context_length=8192)
    )
    assert box.parts()[:2] == [("weights", 9 * GIB, "measured"), ("kv_cache", GIB, "config")]
    box.resident.spec, box.evidence_ = (
        ModelSpec("qwen", "transformers", "/qwen"),
        LoadFailed("it has gone"),
    )
    assert box.parts() == [("weights", 9 * GIB, "measured")]


def test_a_declared_size_needs_no_source_and_nothing_else_does_without(box):
    box.evidence_ = LoadFailed("it is not here")
    with pytest.raises(LoadFailed, match="it is not here"):
        box.parts()
    box.resident.spec = ModelSpec("qwen", "transformers", "/qwen", size=5 * GIB)
    assert box.parts() == [("all", 5 * GIB, "declared")]
    box.resident.spec, box.evidence_ = (
        ModelSpec("drill", "fake"),
        Evidence(why_unknown="as large as declared"),
    )
    with pytest.raises(UnknownSize, match="as large as declared"):
        box.parts()
