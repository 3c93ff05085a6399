"""What llama.cpp is told for a lease, and what it is taken to hold: decisions, values in and values out."""

from __future__ import annotations

import pytest

from gpu_runtime.backends.llama_cpp.options import check, llama_arguments, taken
from gpu_runtime.backends.processes.visible_devices import card_environment
from gpu_runtime.devices.probe import Probe
from gpu_runtime.errors import BadSetting, LoadFailed
from gpu_runtime.facts import HOST, Device, ModelSpec, Share
from gpu_runtime.units import GIB, MIB

CONFIG = {"num_hidden_layers": 32, "max_position_embeddings": 131072}


def spec(**options) -> ModelSpec:
    return ModelSpec("phi", "llama_cpp", source="/m/phi.gguf", options=options)


def shares(*gib: float) -> tuple[Share, ...]:
    return tuple(Share(f"cuda:{number}", int(size * GIB)) for number, size in enumerate(gib))


def told(*gib: float, cards=None, **options):
    return llama_arguments(spec(**options), shares(*gib), "/m/phi.gguf", CONFIG, cards)


def test_on_one_card_all_of_it_goes_there():
    assert told(8) == {
        "model_path": "/m/phi.gguf",
        "name": "phi",
        "n_gpu_layers": -1,
        "n_ctx": 4096,
        "main_gpu": 0,
        "split_mode": 0,
        "embedding": False,
        "needs_gpu": False,
        "flash_attn": False,
    }


def test_over_several_cards_it_is_split_as_the_shares_are():
    """A worker sees just its own cards, so they count from 0."""
    said = told(9, 3, cards=(4, 6))
    assert (said["split_mode"], said["tensor_split"], said["main_gpu"]) == (1, [0.75, 0.25], 0)
    assert told(9, 3, split_mode="row", main_gpu=1)["split_mode"] == 2
    assert told(9, 3, main_gpu=1)["main_gpu"] == 1


def test_in_process_the_cards_have_the_numbers_that_this_process_knows():
    said = told(9, 3, cards=(1, 3), isolated=False, main_gpu=1)
    assert (said["tensor_split"], said["main_gpu"]) == ([0.0, 0.75, 0.0, 0.25], 3)
    assert told(8, cards=(2,), isolated=False)["main_gpu"] == 2


@pytest.mark.parametrize(
    ("layers", "cards", "needs"),
    [(-1, (0,), True), (20, (0,), True), (0, (0,), False), (-1, None, False)],
)
def test_a_gpu_is_needed_where_a_real_card_is_to_hold_layers(layers, cards, needs):
    """A build without GPU support would accept them and compute on the CPU."""
    assert told(8, cards=cards, gpu_layers=layers)["needs_gpu"] is needs


def test_a_build_without_gpu_support_is_refused_for_a_real_card(tmp_path, tiny_gguf):
    """By the real library, which here is such a build."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build of llama-cpp-python has GPU support")
    from gpu_runtime.backends.llama_cpp.channels import ThreadChannel
    from gpu_runtime.backends.llama_cpp.rpc import LlamaEngine

    engine = LlamaEngine("phi", ThreadChannel(lambda line: None), None)
    with pytest.raises(
        LoadFailed,
        match="no GPU support: it would run on the CPU.\n  Build it with:  CMAKE_ARGS=-DGGML_CUDA=on",
    ):
        engine.load(
            {"model_path": str(tiny_gguf), "name": "phi", "n_gpu_layers": -1, "needs_gpu": True},
            None,
        )


def test_a_context_is_as_long_as_asked_for_times_the_sequences():
    assert told(8, context_length=8192, sequences=2)["n_ctx"] == 16384


def test_a_quantised_cache_takes_flash_attention_along():
    said = told(8, cache_dtype="q8_0")
    assert (said["type_k"], said["type_v"], said["flash_attn"]) == (8, 8, True)
    assert told(8, cache_dtype="float16")["flash_attn"] is False


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("n_gpu_layers", 3),
        ("n_ctx", 512),
        ("tensor_split", [1]),
        ("gpu_layers", -2),
        ("gpu_layers", True),
        ("gpu_layers", 1.5),
        ("cache_dtype", "q9"),
        ("split_mode", "diagonal"),
        ("main_gpu", -1),
        ("main_gpu", "0"),
    ],
)
def test_an_option_that_cannot_be_is_one_clear_error(option, value):
    with pytest.raises(BadSetting, match=option):
        check(spec(**{option: value}))


def test_its_bytes_are_what_it_says_that_it_allocated_on_each_card():
    """What lies in RAM beside them is not theirs; the driver counts the context too, and is believed if it says
    more."""
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


def test_on_simulated_cards_it_is_what_would_have_gone_there():
    """Weights to the byte, cache and work space as llama.cpp tells; over several cards in proportion to the shares."""
    facts = {"weight_bytes": 1000, "buffers": {"CPU": {"model": 1048, "KV": 200, "compute": 300}}}
    assert taken(facts, (Share("sim:0", 9),), 1.0, {}) == (Share("sim:0", 1500),)
    assert taken(facts, (Share("sim:0", 9),), 0.5, {}) == (Share("sim:0", 750),)
    assert taken(facts, (Share("sim:0", 6), Share("sim:1", 3)), 1.0, {}) == (
        Share("sim:0", 1000),
        Share("sim:1", 500),
    )


def test_a_worker_sees_its_own_cards_by_what_they_are_and_no_others():
    """A number would mean another card in a process that sees others; a simulated card is none."""
    cards = (
        Device("cuda:0", GIB, uuid="GPU-a", index=0),
        Device("cuda:1", GIB, uuid="GPU-b", index=1),
        Device("rocm:0", GIB, index=0),
        Device("sim:0", GIB, simulated=True),
        Device(HOST, GIB),
    )
    probe = Probe.__new__(Probe)
    probe.devices = cards
    seen = lambda *ids: card_environment(probe, tuple(Share(id, 1) for id in ids))
    assert seen("cuda:1", "cuda:0") == {
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "HIP_VISIBLE_DEVICES": "",
    }
    assert seen("rocm:0") == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}
    assert seen("sim:0") == seen() == {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
