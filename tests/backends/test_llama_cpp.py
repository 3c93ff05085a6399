"""The arguments of llama.cpp for a lease, and the account of its bytes. Both are pure functions."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpu_runtime.backends.llama_cpp.options import (
    LOOKS_FOR_WORK,
    check,
    context_tokens,
    gguf_evidence,
    llama_arguments,
    taken,
    waiting_environment,
)
from gpu_runtime.backends.processes.engine import card_environment
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.devices import nvml
from gpu_runtime.devices.drivers import Card, Listing
from gpu_runtime.devices.probe import Probe, open_probe
from gpu_runtime.errors import BadSetting, LoadFailed
from gpu_runtime.estimation import footprint
from gpu_runtime.facts import HOST, Device, ModelSpec, Share
from gpu_runtime.units import GIB, MIB
from tests import tiny_models

CONFIG = {"num_hidden_layers": 32, "max_position_embeddings": 131072}


def spec(**options) -> ModelSpec:
    return ModelSpec("phi", "llama_cpp", source="/m/phi.gguf", options=options)


def shares(*gib: float) -> tuple[Share, ...]:
    return tuple(Share(f"cuda:{number}", int(size * GIB)) for number, size in enumerate(gib))


def arguments(*gib: float, cards=None, **options):
    return llama_arguments(spec(**options), shares(*gib), "/m/phi.gguf", CONFIG, cards)


def test_how_the_layers_are_split_over_the_cards():
    numbers = {"n_gpu_layers": -1, "n_ctx": 4096, "main_gpu": 0, "split_mode": 0}
    switches = {"embedding": False, "needs_gpu": False, "flash_attn": False}
    assert arguments(8) == {"model_path": "/m/phi.gguf", "name": "phi"} | numbers | switches
    # A worker sees only its own cards, so their numbers begin with 0.
    found = arguments(9, 3, cards=(4, 6))
    assert (found["split_mode"], found["tensor_split"], found["main_gpu"]) == (1, [0.75, 0.25], 0)
    assert arguments(9, 3, split_mode="row", main_gpu=1)["split_mode"] == 2
    assert [arguments(9, 3, main_gpu=n)["main_gpu"] for n in (1, 2)] == [1, 1], (
        "the last of its cards"
    )
    found = arguments(9, 3, cards=(1, 3), isolated=False, main_gpu=1)
    assert (found["tensor_split"], found["main_gpu"]) == ([0.0, 0.75, 0.0, 0.25], 3)
    assert arguments(8, cards=(2,), isolated=False)["main_gpu"] == 2
    found = arguments(8, cache_dtype="q8_0")
    assert (found["type_k"], found["type_v"], found["flash_attn"]) == (8, 8, True)
    assert arguments(8, cache_dtype="float16")["flash_attn"] is False


@pytest.mark.parametrize(
    ("config", "added"),
    [({}, {}), (CONFIG, {"pooling_type": 1}), (CONFIG | {"pooling_type": 0}, {"pooling_type": 1}),
     (CONFIG | {"pooling_type": 3}, {})],
    ids=["unknown", "none named", "none", "last"],
)  # fmt: skip
def test_a_model_for_embeddings_without_a_pooling_type_takes_the_mean(config, added):
    """Without it, a text got a vector for each token, and a base64 answer failed."""
    one = replace(spec(), model_type="embedding")
    found = llama_arguments(one, shares(8), "/m/phi.gguf", config, None)
    assert {key: found[key] for key in found if key == "pooling_type"} == added


@pytest.mark.parametrize(
    ("layers", "cards", "needs"),
    [(-1, (0,), True), (20, (0,), True), (0, (0,), False), (-1, None, False)],
)
def test_a_gpu_is_required_if_a_real_card_gets_layers(layers, cards, needs):
    """A build without GPU support would accept the layers and compute on the CPU."""
    assert arguments(8, cards=cards, gpu_layers=layers)["needs_gpu"] is needs


def test_a_build_without_gpu_support_is_refused_for_a_real_card(tmp_path, tiny_gguf):
    """The test uses the installed library, and is skipped if that build has GPU support."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build of llama-cpp-python has GPU support")
    from gpu_runtime.backends.llama_cpp.backend import LlamaEngine, Thread

    engine = LlamaEngine("phi", tmp_path / "log", Thread(lambda line: None), None)
    with pytest.raises(
        LoadFailed,
        match="no GPU support: it would run on the CPU.\n  Build it with:  CMAKE_ARGS=-DGGML_CUDA=on",
    ):
        engine.load(
            {"model_path": str(tiny_gguf), "name": "phi", "n_gpu_layers": -1, "needs_gpu": True},
            None,
        )


@pytest.mark.processes
def test_a_file_that_lacks_a_tensor_is_refused_with_its_name(tmp_path, monkeypatch):
    """llama.cpp makes up no weights. Its Python error names only the file; its log has the tensor."""
    import gguf

    add = gguf.GGUFWriter.add_tensor
    lacked = "blk.1.ffn_up.weight"

    def all_but_one(self, name, *args, **options):
        return None if name == lacked else add(self, name, *args, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", all_but_one)
    path = tiny_models.gguf_lm(tmp_path / "lacks.gguf")
    backend = open_backend("llama_cpp", open_probe("sim:1GiB,host:1GiB"))
    with pytest.raises(LoadFailed, match=lacked):
        backend.load(ModelSpec("m", "llama_cpp", source=str(path)), (Share("sim:0", GIB),))


def test_an_absent_file_is_a_mistake_of_the_catalogue(tmp_path):
    """`gpu serve` opens no breaker for such errors."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from gpu_runtime.backends.llama_cpp.backend import LlamaEngine, Thread

    engine = LlamaEngine("phi", tmp_path / "log", Thread(lambda line: None), None)
    with pytest.raises(LoadFailed, match="path does not exist") as error:
        engine.load({"model_path": str(tmp_path / "absent.gguf"), "name": "phi"}, None)
    assert error.value.mistake


def test_further_sequences_cost_no_memory(tiny_gguf):
    """The library computes one sequence after the other, so one context is enough. llama-server has slots."""
    assert arguments(8, context_length=8192, sequences=2)["n_ctx"] == 8192
    assert context_tokens(replace(spec(sequences=2), backend="llama-server"), CONFIG) == 8192

    def needed(**options) -> int:
        """The bytes that a lease of the file needs."""
        model = replace(spec(**options), source=str(tiny_gguf))
        return footprint("phi", gguf_evidence(model), options=model.options).bytes

    assert needed(sequences=4) == needed()
    assert needed(sequences=4, context_length=128) == needed(context_length=128) < needed()


LAYERS = st.sampled_from([None, -1, 0, 1, 2, 3, 99])  # of the 2 layers of the file, and its output
SIZES = st.sampled_from([None, 16, 700])
OPTIONS = st.fixed_dictionaries({}, optional={
    "gpu_layers": LAYERS, "context_length": SIZES, "n_batch": SIZES, "n_ubatch": SIZES,
    "flash_attn": st.booleans(), "cache_dtype": st.sampled_from(["Q8_0", "half"]), "embedding": st.booleans(),
})  # fmt: skip


@settings(max_examples=100)
@given(
    OPTIONS, st.sampled_from(["llama_cpp", "llama-server"]), st.sampled_from(["llm", "embedding"])
)
def test_a_lease_is_estimated_for_the_arguments_with_which_the_file_is_loaded(
    tiny_gguf, options, backend, kind
):
    """Layers, context, batch and attention are what llama.cpp gets, and their defaults are its own."""
    one = ModelSpec("m", backend, source=str(tiny_gguf), options=options, model_type=kind)
    plain = gguf_evidence(replace(one, options={}))
    found = gguf_evidence(one)
    loaded = llama_arguments(one, shares(1), str(tiny_gguf), dict(plain.config), None)
    layers = options.get("gpu_layers")
    on_card = 3 if layers in (None, -1) else min(layers, 3)
    assert found.weight_bytes == round(plain.weight_bytes * on_card / 3)
    assert found.config["num_hidden_layers"] == min(on_card, 2)
    assert loaded["n_gpu_layers"] == (-1 if layers is None else layers)
    assert found.config["one_sequence"] == (backend == "llama_cpp")
    usual = min(4096, plain.config["max_position_embeddings"])
    tokens = options.get("context_length") or usual
    assert found.config["context_at_load"] == loaded["n_ctx"] == tokens
    assert loaded["embedding"] == (kind == "embedding" or options.get("embedding", False))
    sizes = [options.get(name) for name in ("n_batch", "n_ubatch")]
    if loaded["embedding"]:  # a text is computed in one batch
        most = max(filter(None, sizes), default=tokens)
        assert (loaded["n_batch"], loaded["n_ubatch"]) == (most, most)
    else:
        most = min(512 if size is None else size for size in sizes)
    assert found.config["batch_tokens"] == most
    quantised = options.get("cache_dtype") == "Q8_0"
    assert loaded["flash_attn"] == options.get("flash_attn", quantised)
    assert found.config["written_scores"] == (not loaded["flash_attn"])


def test_of_a_file_that_is_elsewhere_the_layers_on_the_card_are_known(tmp_path):
    pointer = tmp_path / "far.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4000\n")
    for layers, weights, on_card in ((0, 0, 0), (7, None, 7), (-1, None, None)):
        one = replace(spec(gpu_layers=layers), source=str(pointer))
        found = gguf_evidence(one)
        assert (found.weight_bytes, found.config.get("layers_on_card")) == (weights, on_card)


def test_an_unknown_dtype_of_the_cache_is_one_clear_error():
    with pytest.raises(BadSetting, match="cache_dtype"):
        check(spec(cache_dtype="q9"))


def test_on_real_cards_its_bytes_are_the_reported_buffers():
    """Buffers in RAM do not count. The driver's figure includes the context. The larger figure counts."""
    facts = {
        "weight_bytes": 9 * MIB,
        "buffers": {
            "CUDA0": {"model": 6 * MIB, "KV": MIB, "compute": MIB},
            "CUDA1": {"model": 3 * MIB, "KV": MIB},
            "CPU": {"model": 2 * MIB},
            "CUDA_Host": {"output": MIB},
        },
    }
    both = shares(1, 1)
    assert taken(facts, both, 1.0, {}) == (Share("cuda:0", 8 * MIB), Share("cuda:1", 4 * MIB))
    assert taken(facts, both, 1.0, {"cuda:0": 500 * MIB})[0] == Share("cuda:0", 500 * MIB)
    # A worker in this process sees all cards of this process, so its second card is its CUDA1.
    second = (Share("cuda:1", MIB),)
    assert taken(facts, second, 1.0, {}, (1,)) == (Share("cuda:1", 4 * MIB),)


def test_on_simulated_cards_its_bytes_are_those_a_real_card_would_hold():
    """Weights to the byte, cache and work space as reported, in proportion to shares and layers; results in RAM."""
    buffers = {"model": 1048, "KV": 150, "RS": 50, "compute": 300, "output": 50}
    facts = {"weight_bytes": 1000, "buffers": {"CPU": buffers}}
    assert taken(facts, (Share("sim:0", 9),), 1.0, {}) == (Share("sim:0", 1500),)
    assert taken(facts, (Share("sim:0", 9),), 0.5, {}) == (Share("sim:0", 900),)
    assert taken(facts, (Share("sim:0", 9),), 0.0, {}) == (Share("sim:0", 0),)
    assert taken(facts, (Share("sim:0", 6), Share("sim:1", 3)), 1.0, {}) == (
        Share("sim:0", 1000),
        Share("sim:1", 500),
    )


def test_a_worker_sees_only_its_own_cards_by_uuid():
    """In a process that sees other cards, a card has another number. A simulated card is not visible."""
    cards = (
        Device("cuda:0", GIB, uuid="GPU-a", index=0),
        Device("cuda:1", GIB, uuid="GPU-b", index=1),
        Device("rocm:0", GIB, uuid="GPU-r", index=0),
        Device("sim:0", GIB, simulated=True),
        Device(HOST, GIB),
    )
    probe = Probe.__new__(Probe)
    probe.devices, probe.listing = cards, None
    seen = lambda *ids: card_environment(probe, tuple(Share(id, 1) for id in ids))
    assert seen("cuda:1", "cuda:0") == {
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "HIP_VISIBLE_DEVICES": "",
    }
    assert seen("rocm:0") == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}
    assert seen("sim:0") == seen() == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("failed", [{}, {"1": "GPU is lost"}])
def test_an_engine_that_knows_no_uuids_sees_its_cards_by_the_driver_s_numbers(failed):
    """In a container the book has other numbers. Where a card cannot be listed, CUDA's numbers are not known."""
    made = [Device(f"cuda:{number}", GIB, uuid=f"GPU-{number}", index=number) for number in (0, 2)]
    cards = tuple(Card(device, None, device.uuid) for device in made)
    probe = Probe((*made, Device(HOST, GIB)), Listing(nvml, cards, failed))
    probe.rename({"cuda:0": "cuda:4"})
    shares = (Share("cuda:2", 1), Share("cuda:4", 1))
    seen = card_environment(probe, shares, by_number=True)
    if failed:
        assert seen == card_environment(probe, shares)
        assert seen == {"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0", "HIP_VISIBLE_DEVICES": ""}
    else:
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert seen == {"CUDA_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "", **order}
        assert card_environment(probe, (), by_number=True)["CUDA_VISIBLE_DEVICES"] == ""


def test_an_instance_has_no_number_and_a_renamed_amd_card_keeps_its_own():
    part = Device("cuda:0.1", GIB, uuid="MIG-1", index=0)
    probe = Probe((part, Device(HOST, GIB)), Listing(nvml, (Card(part, None, "GPU-0"),)))
    seen = card_environment(probe, (Share("cuda:0.1", 1),), by_number=True)
    assert seen == {"CUDA_VISIBLE_DEVICES": "MIG-1", "HIP_VISIBLE_DEVICES": ""}
    card = Device("rocm:0", GIB, uuid="GPU-r", index=0)
    probe = Probe((card, Device(HOST, GIB)), Listing(nvml, (Card(card, None, "GPU-r"),)))
    probe.rename({"rocm:0": "rocm:1"})
    assert card_environment(probe, (Share("rocm:1", 1),))["HIP_VISIBLE_DEVICES"] == "0"


@pytest.mark.processes
def test_the_threads_of_a_worker_sleep_soon_after_their_work(tiny_gguf, monkeypatch):
    """By default they look for work for 6 ms after each batch, and the server and its clients wait for
    that core.
    """
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    one = ModelSpec("tiny", "llama_cpp", source=str(tiny_gguf))
    backend = open_backend("llama_cpp", open_probe("sim:1GiB,host:1GiB"))
    handle = backend.load(one, (Share("sim:0", MIB),))
    try:
        environment = Path(f"/proc/{handle.value.pid}/environ").read_bytes().split(b"\0")
    finally:
        backend.drop(handle)
    assert {f"{name}={value}".encode() for name, value in LOOKS_FOR_WORK.items()} <= {*environment}
    assert b"CUDA_VISIBLE_DEVICES=" in environment, (
        "the cards of its lease, not those of this process"
    )


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_threads_wait_is_left_to_a_user_who_has_set_it(name, monkeypatch):
    monkeypatch.setenv(name, "ACTIVE" if name.startswith("OMP") else "7")
    assert waiting_environment() == {}
