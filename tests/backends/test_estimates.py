"""Estimates compared with real models: the weights, the cache of a forward pass, and its activations."""

import json
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gpu_runtime import estimation
from gpu_runtime.backends.formats import sources
from gpu_runtime.backends.formats.sources import AbsentBackend
from gpu_runtime.backends.registry import file_backend, open_backend
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.estimation import PlannedUse, cache_layers, kv_cache_bytes
from gpu_runtime.facts import ModelSpec, Share, beside
from gpu_runtime.units import MIB
from tests import tiny_models
from tests.worlds import footprint

pytestmark = pytest.mark.thorough

TOKENS, WINDOW = 96, 32
SHAPE = dict(vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=6)
SHAPE |= dict(num_attention_heads=8, num_key_value_heads=2)
SHAPE |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
GPT2 = dict(vocab_size=512, n_embd=64, n_layer=6, n_head=8, bos_token_id=1, eos_token_id=2)
LATENT = dict(kv_lora_rank=32, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
EXPERTS = dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2)
EXPERTS |= dict(n_group=1, topk_group=1, first_k_dense_replace=1)
FAMILIES = {
    "multi-head": ("Llama", dict(SHAPE, num_key_value_heads=8)),
    "grouped": ("Llama", SHAPE),
    "own head size": ("Qwen3", dict(SHAPE, head_dim=32)),
    "window": ("Mistral", dict(SHAPE, sliding_window=WINDOW)),
    "no window": ("Qwen2", dict(SHAPE, sliding_window=WINDOW)),
    "upper layers": (
        "Qwen2",
        dict(SHAPE, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=2),
    ),
    "every second": ("Gemma2", dict(SHAPE, head_dim=8, sliding_window=WINDOW)),
    "every sixth": ("Gemma3Text", dict(SHAPE, head_dim=8, sliding_window=WINDOW)),
    "every fourth": ("Cohere2", dict(SHAPE, sliding_window=WINDOW)),
    "latent": ("DeepseekV3", SHAPE | EXPERTS | LATENT | {"num_key_value_heads": 8}),
    "GPT-2": ("GPT2", GPT2),
    "one key for all": ("GPTBigCode", GPT2),
}


def model_of(family: str) -> torch.nn.Module:
    name, shape = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**shape)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def said(model: torch.nn.Module, *, without: tuple[str, ...] = ()) -> dict:
    """The model's config as a dictionary, as a config file contains it. The keys `without` are left out."""
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return {key: value for key, value in config.items() if key not in without}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimated_cache_is_that_of_a_forward_pass(family):
    """With and without layer types. With a window, transformers keeps one token less: the newest is in the input."""
    model = model_of(family)
    with torch.no_grad():
        cache = model(torch.zeros(2, TOKENS, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    for without in ((), ("layer_types",)):
        layers = cache_layers(said(model, without=without))
        one_less = [layer._replace(window=layer.window and layer.window - 1) for layer in layers]
        assert kv_cache_bytes(one_less, tokens=TOKENS, sequences=2, bits=32) == held
        most = held * WINDOW / (WINDOW - 1)
        assert kv_cache_bytes(layers, tokens=TOKENS, sequences=2, bits=32) <= most


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that exist at the same time, and their peak."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        tensors = (*model.parameters(), *model.buffers())
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        answer = function(*args, **(kwargs or {}))
        for tensor in tree_iter(answer):
            if not isinstance(tensor, torch.Tensor):
                continue
            if (storage := tensor.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return answer

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("family", "shape", "eager"),
    [
        ("Llama", SHAPE, False),
        ("Llama", dict(SHAPE, intermediate_size=352), False),
        ("Llama", dict(SHAPE, hidden_size=128), False),
        ("Qwen3", dict(SHAPE, head_dim=16), False),
        ("Mixtral", dict(SHAPE, num_local_experts=4), False),
        ("Llama", dict(SHAPE, attn_implementation="eager"), True),
        ("GPT2", GPT2, False),
    ],
    ids=["llama", "wide inside", "wide", "qwen", "experts", "eager", "gpt2"],
)
def test_estimated_activations_are_those_of_a_forward_pass(family, shape, eager):
    """Right within a tenth, without weights and cache, for a context that is read in one pass."""
    shape = dict(shape)
    attention = shape.pop("attn_implementation", "sdpa")
    config = getattr(transformers, f"{family}Config")(**shape)
    kind = dict(dtype=torch.float32, attn_implementation=attention)
    model = transformers.AutoModelForCausalLM.from_config(config, **kind).eval()
    with torch.no_grad(), LiveBytes(model) as live:
        answer = model(torch.zeros(2, 512, dtype=torch.long), use_cache=True, logits_to_keep=1)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in answer.past_key_values.layers)
    estimate = estimation.activation_bytes(said(model), PlannedUse(512, 2, 32.0, 4, eager))
    assert estimate == pytest.approx(live.peak - cache, rel=0.1)


def converted(directory: Path, dtype: str) -> Path:
    """Rewrites all weights of `directory` as `dtype`. The config keeps its own dtype."""
    for file in directory.glob("*.safetensors"):
        tensors = {key: value.to(getattr(torch, dtype)) for key, value in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return directory


def config_with(directory: Path, **fields: object) -> Path:
    """Sets `fields` of the config.json in `directory`. A field with None is removed."""
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def lm(path: Path, config: str, stored: str) -> Path:
    """A language model whose config has the dtype `config`, with weights of the dtype `stored`."""
    return converted(tiny_models.causal_lm(path, size="8 MiB", dtype=config), stored)


def float32(path: Path) -> Path:
    return lm(path, "float32", "float32")


def saved(path: Path, model: torch.nn.Module, **extra: torch.Tensor) -> Path:
    """Saves `model` in `path`, and adds the tensors `extra` to its file."""
    model.save_pretrained(path)
    if extra:
        file = path / "model.safetensors"
        save_file({**load_file(file), **extra}, file, {"format": "pt"})
    return path


def t5(path: Path, dtype: str) -> Path:
    shape = dict(vocab_size=512, d_model=128, d_kv=16, d_ff=512, num_layers=3, num_heads=8)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
    copy = model.shared.weight.detach().to(getattr(torch, dtype)).clone()
    older = {"encoder.embed_tokens.weight": copy, "lm_head.weight": copy.clone()}
    return saved(path, model.to(getattr(torch, dtype)), **older)


def masked_lm(path: Path) -> Path:
    shape = dict(vocab_size=4096, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**shape, intermediate_size=128))
    model.bert.pooler = transformers.models.bert.modeling_bert.BertPooler(model.config)
    copy = model.bert.embeddings.word_embeddings.weight.detach().clone()
    return saved(path, model, **{"cls.predictions.decoder.weight": copy})


def dense(path: Path) -> Path:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    tiny_models.sentence_embedder(path, modules.Pooling(64, "cls"), modules.Dense(64, 4096))
    return path


def in_a_folder(path: Path) -> Path:
    return gguf(path).parent


def gguf(path: Path, **given: object) -> Path:
    path.mkdir()
    return tiny_models.gguf_lm(path / "m.gguf", size="32 MiB", **given)


gguf_2048, gguf_4096 = partial(gguf, context=2048), partial(gguf, context=4096)
CHECKPOINTS = {  # what a person loads -> how it is made, and its options
    "float32": (float32, {}),
    "float16": (lambda path: lm(path, "float16", "float16"), {}),
    "float16 files, float32 config": (lambda path: lm(path, "float32", "float16"), {}),
    "float32 files, bfloat16 config": (lambda path: lm(path, "bfloat16", "float32"), {}),
    "bfloat16 files, no dtype in the config": (
        lambda path: config_with(lm(path, "bfloat16", "bfloat16"), dtype=None),
        {},
    ),
    "float16 files, float32 in torch_dtype": (
        lambda path: config_with(lm(path, "float16", "float16"), dtype=None, torch_dtype="float32"),
        {},
    ),
    "float32 files, torch_dtype=float16": (float32, {"torch_dtype": "float16"}),
    "float32 files, dtype=float16": (float32, {"dtype": "float16"}),
    "tied": (lambda path: tiny_models.causal_lm(path, tied=True, vocab_size=8192), {}),
    "sharded": (lambda path: tiny_models.causal_lm(path, size="8 MiB", shard="1MB"), {}),
    "T5 in float16, embeddings three times": (lambda path: t5(path, "float16"), {}),
    "BERT with its head, as an embedder": (masked_lm, {"task": "feature-extraction"}),
    "a language model as an embedder": (
        lambda path: tiny_models.causal_lm(path, vocab_size=8192),
        {"task": "feature-extraction"},
    ),
    "sentence-transformers, with a large Dense": (dense, {"task": "feature-extraction"}),
    "the same in bfloat16": (dense, {"task": "feature-extraction", "dtype": "bfloat16"}),
    "reranker": (tiny_models.reranker, {}),
    "pictures": (tiny_models.vision_lm, {}),
    "GGUF file": (gguf, {}),
    "GGUF folder": (in_a_folder, {}),
    "GGUF with long context": (gguf_4096, {"context_length": 4096}),
    "GGUF with large batches": (gguf_2048, {"n_batch": 2048, "n_ubatch": 2048}),
    "GGUF with small batches": (gguf, {"n_batch": 64}),
    "GGUF with half of its layers": (gguf, {"gpu_layers": 1}),
    "GGUF, cache on the CPU": (gguf_4096, {"offload_kqv": False, "context_length": 4096}),
    "GGUF with a cache of q8_0": (gguf_4096, {"cache_dtype": "q8_0", "context_length": 4096}),
    "GGUF embedder": (gguf, {"embedding": True}),
    "GGUF embedder of long texts": (gguf_2048, {"embedding": True}),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_what_is_planned_is_loaded_within_seven_per_cent(tmp_path, kind):
    """The plan of a path, the admission of a registered model and the catalogue have one figure."""
    make, options = CHECKPOINTS[kind]
    path = str(make(tmp_path / "m"))
    backend = open_backend(file_backend(path), open_probe("sim:1GiB,host:1GiB"))
    spec = ModelSpec("m", backend.name, path, options=options)
    planned = footprint(backend, spec)
    handle = backend.load(spec, (Share("sim:0", planned.bytes),))
    (held,) = beside(backend.measure(handle), backend.working_bytes(handle) or 0)
    backend.drop(handle)
    assert planned.bytes == pytest.approx(held.bytes, rel=0.07)
    assert footprint(AbsentBackend(backend.name), spec) == planned or backend.name == "llama_cpp"


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint8, torch.bool]


def test_a_file_of_many_dtypes_is_exact(tmp_path):
    """Quantised checkpoints store codes, scales and norms in different dtypes."""
    tensors = {f"t{n}": torch.zeros(n + 3, 257, dtype=dtype) for n, dtype in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "m.safetensors")
    found = sources.evidence(str(tmp_path / "m.safetensors"), "m")
    assert found.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    half = sources.evidence(str(tmp_path / "m.safetensors"), "m", {"dtype": "float16"})
    sizes = (t.numel() * 2 if t.dtype in FLOATS else t.nbytes for t in tensors.values())
    assert half.weight_bytes == sum(sizes)


def test_a_changed_source_has_another_fingerprint(tmp_path):
    directory = tiny_models.causal_lm(tmp_path / "m")
    before = sources.evidence(str(directory), "m")
    assert sources.evidence(str(directory), "m") == before and before.fingerprint
    tiny_models.causal_lm(directory, seed=1)
    assert sources.evidence(str(directory), "m").fingerprint != before.fingerprint


def test_evidence_of_a_transformers_factory_has_its_config(probe):
    """With the config, a context can be reserved for a model that a factory makes."""
    backend = open_backend("torch", probe)
    config = transformers.LlamaConfig(**SHAPE)
    spec = ModelSpec("m", "torch", options=dict(context_length=64))
    found = footprint(backend, spec, lambda: transformers.LlamaForCausalLM(config))
    assert [part.name for part in found.parts] == ["weights", "kv_cache", "activations"]
    assert found.heads == 8 and found.bytes < 2 * MIB
