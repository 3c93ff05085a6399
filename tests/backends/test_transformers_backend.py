"""Model directories: how they are loaded, which ones are refused by name, and that a changed weight is never lost."""

import io
import json
import logging
import os
import pickle
import re
import shutil
import struct
import sys
from copy import deepcopy as copy_of

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gpu_runtime.backends.registry import open_backend
from gpu_runtime.errors import BadSetting, CannotGovern, LoadFailed, NotAModel
from gpu_runtime.facts import ModelSpec, Share
from tests import tiny_models
from tests.worlds import footprint

CARD, HOST = (Share("sim:0", 0),), (Share("host", 0),)
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def backend(probe):
    return open_backend("transformers", probe)


def spec(directory, model_type="other", **options):
    return ModelSpec(
        "m", "transformers", source=str(directory), model_type=model_type, options=options
    )


def answer(module):
    with torch.no_grad():
        return module(IDS)[0]


@pytest.fixture
def copy(llama, tmp_path):
    """A copy of the model's directory that a test may change."""
    return shutil.copytree(llama, tmp_path / "copy")


def configure(directory, file="config.json", **fields):
    """Sets `fields` of a JSON file of the model, and makes the file if there is none."""
    path = directory / file
    saved = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**saved, **fields}))


def test_logits_equal_those_of_transformers_after_every_move(backend, llama):
    """Equal to the bit after a load, after moves, and after a drop and a reload into the same object."""
    from transformers import AutoModelForCausalLM

    expected = answer(AutoModelForCausalLM.from_pretrained(llama, local_files_only=True))
    model = backend.load(spec(llama), CARD)
    module = backend.value(model)
    assert type(module).__name__ == "LlamaForCausalLM" and not module.training
    assert torch.equal(answer(module), expected)
    module.generate(IDS, max_new_tokens=2, do_sample=False)
    module.requires_grad_(False)
    backend.move(model, HOST)
    backend.move(model, CARD)
    assert torch.equal(answer(module), expected)
    assert backend.droppable(model) and backend.unchanged(model), "it was used and not changed"
    backend.drop(model)
    assert backend.value(backend.load(spec(llama), CARD, into=module)) is module
    assert torch.equal(answer(module), expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "dtype, option",
    [("float32", None), ("bfloat16", None), ("float32", "bfloat16"), ("bfloat16", "float32")],
)
@pytest.mark.parametrize("shard", [None, "100KB"], ids=["one file", "sharded"])
def test_the_header_gives_the_bytes(backend, tmp_path, tied, dtype, option, shard):
    """As stored or converted, with tied weights once, in one file or several: within 2 %."""
    directory = tiny_models.causal_lm(tmp_path / "m", tied=tied, dtype=dtype, shard=shard)
    assert len(list(directory.glob("*.safetensors"))) > 1 or not shard
    given = spec(directory, **({"dtype": option} if option else {}))
    found = footprint(backend, given)
    assert found.parts[0].source == "safetensors header"
    model = backend.load(given, CARD)
    measured = backend.measure(model)[0].bytes
    assert abs(found.bytes - measured) <= 0.02 * measured
    module = backend.value(model)
    assert module.dtype == getattr(torch, option or dtype)
    assert backend.droppable(model), "tied weights and computed buffers are not missing"
    assert (module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()) == tied


def test_replaced_files_are_read_again(backend, tmp_path):
    directory = tiny_models.causal_lm(tmp_path / "m", dtype="float32")
    before = footprint(backend, spec(directory)).bytes
    tiny_models.causal_lm(directory, dtype="bfloat16")
    assert footprint(backend, spec(directory)).bytes == before / 2


def test_tied_weights_stored_twice_count_once(backend, tmp_path):
    """Some checkpoints store a tied head a second time."""
    directory = tiny_models.causal_lm(tmp_path / "m", tied=True)
    before = footprint(backend, spec(directory)).bytes
    weights = load_file(directory / "model.safetensors")
    weights = {key: value.clone() for key, value in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert footprint(backend, spec(directory)).bytes == before


def test_the_architecture_decides_the_class_unless_task_or_type_do(backend, tmp_path, llama):
    def kind(given):
        return type(backend.value(backend.load(given, CARD))).__name__

    embedder, reranker = tiny_models.embedder(tmp_path / "e"), tiny_models.reranker(tmp_path / "r")
    assert kind(spec(llama)) == kind(spec(llama, "llm")) == "LlamaForCausalLM"
    assert kind(spec(embedder)) == kind(spec(embedder, "embedding")) == "LlamaModel"
    assert (
        kind(spec(reranker)) == kind(spec(reranker, "reranker")) == "LlamaForSequenceClassification"
    )
    assert kind(spec(llama, "embedding")) == kind(spec(llama, task="embedding")) == "LlamaModel"
    with pytest.raises(BadSetting, match="task='poetry'"):
        backend.load(spec(llama, task="poetry"), CARD)


def test_the_tokenizer_is_attached_if_there_is_one(backend, copy):
    module = backend.value(backend.load(spec(copy), CARD))
    assert module.tokenizer("the quick brown", return_tensors="pt")["input_ids"].numel()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (copy / file).unlink()
    assert not hasattr(backend.value(backend.load(spec(copy), CARD)), "tokenizer")


def test_a_load_is_silent_and_restores_the_user_s_settings(backend, llama, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    logging.set_verbosity_info()
    try:
        backend.load(spec(llama), CARD)
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")


def test_options_are_passed_on_or_refused(backend, llama):
    module = backend.value(backend.load(spec(llama, attn_implementation="eager"), CARD))
    assert module.config._attn_implementation == "eager"
    for dtype in ("int8", "float99", "nn"):
        with pytest.raises(BadSetting, match="dtype"):
            footprint(backend, spec(llama, dtype=dtype))


OWN = {"model_type": "own", "architectures": ["Own"]}
MODEL = {"AutoModel": "own.Own", "AutoModelForCausalLM": "own.Own"}
TOKENIZER, PICTURES = {"AutoTokenizer": ["own.Own", None]}, {"AutoImageProcessor": "own.Own"}
OWN_CODE = {  # the file, its fields that name the code, and its auto_map
    "config": ("config.json", OWN, {"AutoConfig": "own.Own", **MODEL}),
    "model": ("config.json", {**OWN, "model_type": "idefics3_vision"}, MODEL),
    "tokenizer": ("tokenizer_config.json", {"tokenizer_class": "Own"}, TOKENIZER),
    "processor": ("processor_config.json", {"processor_class": "Own"}, {"AutoProcessor": "own.O"}),
    "image processor": ("preprocessor_config.json", {"image_processor_type": "Own"}, PICTURES),
}


@pytest.mark.parametrize("part", OWN_CODE)
@pytest.mark.parametrize("answer", ["y", "n"])
def test_code_of_a_models_directory_never_runs_unasked_and_nobody_is_asked(
    backend, copy, monkeypatch, part, answer
):
    """Where the option was left out, transformers asked on the terminal, and `y` ran the code."""
    file, own, entries = OWN_CODE[part]
    configure(copy, file, **own, auto_map=entries)
    (copy / "own.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\nraise SystemExit('it ran')")
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or answer)
    if part in ("config", "tokenizer", "processor"):
        with pytest.raises(LoadFailed, match="GPU_TRUST_REMOTE_CODE=true"):
            backend.load(spec(copy), CARD)
    else:  # transformers has a class of its own, and takes that
        backend.load(spec(copy, allow_missing=True), CARD)
    backend.pieces(spec(copy))
    assert not asked and not (copy / "ran").exists()


# -- no weight is made up --------------------------------------------------------------------------
def without(file, name="", shape=None):
    """Removes the tensor `name`, or any one, from the `file`, or gives it another `shape`. Returns its name."""
    tensors = load_file(file)
    name = name or next(iter(tensors))
    taken = tensors.pop(name)
    if shape:
        tensors[name] = taken.new_ones(shape)
    save_file(tensors, file, {"format": "pt"})
    return name


LACKED = "model.layers.1.mlp.up_proj.weight"


def test_a_file_that_lacks_a_tensor_is_not_loaded_with_a_random_one(backend, copy, caplog):
    """Two loads of such a model had different weights, and nothing was said."""
    without(copy / "model.safetensors", LACKED)
    state = torch.get_rng_state()
    with pytest.raises(LoadFailed, match=f"lack 1 of the .*{LACKED}") as failed:
        backend.load(spec(copy), CARD)
    assert failed.value.missing == (LACKED,) and "allow_missing=True" in str(failed.value)
    assert torch.equal(torch.get_rng_state(), state)
    model = backend.load(spec(copy, allow_missing=True), CARD)
    assert not backend.droppable(model)
    assert torch.equal(torch.get_rng_state(), state)
    backend.load(spec(copy, allow_missing=True), CARD)
    assert [record.message for record in caplog.records if LACKED in record.message] == [
        caplog.records[0].message
    ]


@pytest.mark.parametrize("allowed", [False, True])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(backend, copy, allowed):
    without(copy / "model.safetensors", LACKED, shape=(3, 5))
    with pytest.raises(LoadFailed, match=rf"{LACKED} has \(3, 5\) in the files"):
        backend.load(spec(copy, allow_missing=allowed), CARD)


def test_tensors_that_the_module_does_not_use_are_named_once(backend, copy, caplog):
    configure(copy, num_hidden_layers=1)
    for _ in range(2):
        backend.load(spec(copy), CARD)
    told = [record.message for record in caplog.records if "does not use" in record.message]
    assert len(told) == 1 and "model.layers.1." in told[0] and told[0].startswith("m: ")


def test_a_library_s_warning_is_shown_under_the_model_s_name(backend, copy, caplog, monkeypatch):
    import transformers

    original = transformers.AutoTokenizer.from_pretrained

    def warns(*args, **options):
        logging.getLogger("transformers.any").warning("the tokenizer\nis old")
        return original(*args, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", warns)
    for _ in range(2):
        backend.load(spec(copy), CARD)
    assert [record.message for record in caplog.records] == ["m: the tokenizer is old"]


# -- a changed weight is never lost ----------------------------------------------------------------
def fused(module):
    module.requires_grad_(True)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=1e-3, fused=True).step()
    module.zero_grad(set_to_none=True)


def replaced(module):
    module.lm_head.weight = nn.Parameter(module.lm_head.weight.detach() + 1)


def swapped(module):
    rows = module.lm_head.weight.data
    rows.index_copy_(0, torch.tensor([0, 1]), rows[[1, 0]])


CHANGES = {
    "add_": lambda m: m.lm_head.weight.detach().add_(1e-3),
    "data.add_": lambda m: m.lm_head.weight.data.add_(1e-3),
    "one element": lambda m: m.lm_head.weight.data[3, 4].mul_(1.0001),
    "sign": lambda m: m.lm_head.weight.data.neg_(),
    "swap of rows": swapped,
    "numpy": lambda m: m.lm_head.weight.detach().numpy().__setitem__((0, 0), 7.0),
    "dlpack": lambda m: torch.from_dlpack(m.lm_head.weight.detach()).zero_(),
    "set_ alias": lambda m: torch.empty(0).set_(m.lm_head.weight.untyped_storage()).fill_(2),
    "fused optimizer": fused,
    "buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(2),
    "parameter replaced": replaced,
    "data replaced": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.data * 2),
    "gradient": lambda m: setattr(m.lm_head.weight, "grad", torch.ones_like(m.lm_head.weight)),
    "tokens added": lambda m: m.resize_token_embeddings(600, mean_resizing=False),
    "adapter added": lambda m: m.lm_head.register_parameter("lora_A", nn.Parameter(torch.ones(4))),
    "buffer added": lambda m: m.register_buffer("steering", torch.ones(64)),
    "half of it": lambda m: m.half(),
    "layer removed": lambda m: m.model.layers.__delitem__(1),
    "weights tied": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
}


IN_PLACE = list(CHANGES)[:10]


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["card", "host"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_changed_in_any_way_is_not_droppable(backend, llama, name, where):
    """By comparing bytes: half of the changes leave `_version`. Bytes that are away refuse a change in place."""
    model = backend.load(spec(llama), CARD)
    if where == "host":
        backend.move(model, HOST)
    assert backend.droppable(model) and backend.unchanged(model)
    if where == "host" and name in IN_PLACE:
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            CHANGES[name](backend.value(model))
        return
    CHANGES[name](backend.value(model))
    assert not backend.unchanged(model)
    assert not backend.droppable(model), "after one difference it stays undroppable"
    backend.move(model, CARD if where == "host" else HOST)
    assert not backend.unchanged(model), "a move must not hide a change"


def test_changed_running_statistics_make_it_undroppable(backend, tmp_path):
    """In training mode BatchNorm writes to its buffers. A version counter may not show it."""
    from transformers import ResNetConfig, ResNetForImageClassification

    directory = tmp_path / "resnet"
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    ResNetForImageClassification(config).save_pretrained(directory)
    model = backend.load(spec(directory), CARD)
    module = backend.value(model)
    pixels = torch.randn(2, 3, 32, 32)
    module(pixels)
    assert backend.unchanged(model)
    module.train()(pixels)
    assert not backend.unchanged(model)


def replaced_file(weights):
    shutil.copy2(weights, weights.with_name("new"))
    weights.with_name("new").replace(weights)


def rewritten_with_its_old_times(weights):
    """No program can set a file's time of change."""
    stat = weights.stat()
    weights.write_bytes(weights.read_bytes())
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


SOURCES = {
    "touched": lambda weights: weights.touch(),
    "replaced": replaced_file,
    "gone": lambda weights: weights.unlink(),
    "rewritten": rewritten_with_its_old_times,
    "its config": lambda weights: configure(weights.parent, note=1),
}


@pytest.mark.parametrize("change", SOURCES.values(), ids=SOURCES)
def test_a_model_whose_source_changed_is_not_droppable(backend, copy, change):
    """After the source files have changed, they could no longer restore the model."""
    model = backend.load(spec(copy), CARD)
    change(copy / "model.safetensors")
    assert not backend.droppable(model) and not backend.unchanged(model)


def test_an_object_that_was_changed_meanwhile_is_not_filled_with_wrong_weights(
    backend, probe, llama
):
    model = backend.load(spec(llama), CARD)
    module = backend.value(model)
    backend.drop(model)
    del module.model.layers[1]
    with pytest.raises(LoadFailed, match="no longer has the tensors of its source"):
        backend.load(spec(llama), CARD, into=module)
    assert not any(probe.used().values())


# -- damaged and unusable sources ------------------------------------------------------------------
def header(edit):
    """Returns a function that damages a file: it applies `edit` to the file's header."""

    def rewrite(path):
        data = path.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        entries = json.loads(data[8 : 8 + length])
        edit(entries)
        raw = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])

    return rewrite


def first(header):
    return next(value for key, value in header.items() if key != "__metadata__")


def rewritten(change):
    """A function that writes `change(bytes)` in the place of a file's bytes."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


NO_HEADER = "not a safetensors header"
DAMAGES = {
    "truncated": (tiny_models.truncate, "truncated"),
    "cut to nothing": (lambda p: p.write_bytes(b""), "it is 0 bytes long"),
    "cut in the header": (lambda p: p.write_bytes(p.read_bytes()[:100]), "it is 100 bytes long"),
    "too long": (lambda p: p.open("ab").write(b"x"), "longer than it should be"),
    "huge header": (rewritten(lambda data: b"\xff" * 8 + data[8:]), "its header would be"),
    "no json": (rewritten(lambda data: data[:8] + bytes(200) + data[208:]), NO_HEADER),
    "json list": (rewritten(lambda data: struct.pack("<Q", 2) + b"[]"), NO_HEADER),
    "overlap": (
        header(lambda h: first(h).update(dtype="F32", shape=[1], data_offsets=[4, 8])),
        "a gap or an overlap",
    ),
    "negative": (header(lambda h: first(h).update(data_offsets=[-8, 8])), NO_HEADER),
    "shape": (header(lambda h: first(h).update(shape=[10**9])), NO_HEADER),
    "fields": (header(lambda h: first(h).pop("dtype")), NO_HEADER),
    "number": (header(lambda h: h.update(extra=7)), NO_HEADER),
}


@pytest.mark.parametrize("damage, why", DAMAGES.values(), ids=DAMAGES)
def test_an_error_names_the_damaged_file_and_the_damage(backend, probe, copy, damage, why):
    """The damage is found before the file is mapped, since a read past the end of a mapped file ends the process."""
    damage(copy / "model.safetensors")
    for attempt in (lambda: footprint(backend, spec(copy)), lambda: backend.load(spec(copy), CARD)):
        with pytest.raises(LoadFailed, match=why) as error:
            attempt()
        assert "model.safetensors" in str(error.value) and not isinstance(error.value, NotAModel)
    assert not any(probe.used().values())


def test_a_missing_incomplete_or_escaping_shard_is_named(backend, tmp_path):
    directory = tiny_models.causal_lm(tmp_path / "m", shard="100KB")
    index = directory / "model.safetensors.index.json"
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    name = without(shard)
    with pytest.raises(LoadFailed, match=re.escape(name)):
        backend.load(spec(directory), CARD)
    shard.rename(tmp_path / "away")
    with pytest.raises(
        LoadFailed,
        match=f"{shard.name} cannot be loaded: the index lists it, but the file is missing",
    ):
        footprint(backend, spec(directory))
    index.write_text(index.read_text().replace(shard.name, "../away"))
    with pytest.raises(LoadFailed, match="not a file beside it"):
        footprint(backend, spec(directory))
    index.write_text("{}")
    with pytest.raises(LoadFailed, match="no weight_map"):
        footprint(backend, spec(directory))


def test_an_unknown_architecture_fails_in_one_line(backend, copy, probe):
    configure(copy, model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(LoadFailed) as error:
        backend.load(spec(copy), CARD)
    assert len(str(error.value).splitlines()) == 1 and str(copy) in str(error.value)
    assert not any(probe.used().values())


def test_a_source_without_safe_weights_is_refused_with_what_it_needs(backend, tmp_path):
    with pytest.raises(NotAModel, match="looked for config.json beside .*found nothing"):
        footprint(backend, spec(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotAModel, match="looked for model.safetensors or .*found config.json"):
        footprint(backend, spec(tmp_path))
    with pytest.raises(NotAModel, match="is not a model"):
        footprint(backend, spec("/no/such/place"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadFailed, match="config.json cannot be loaded: its JSON"):
        footprint(backend, spec(tmp_path))
    with pytest.raises(LoadFailed, match="pytorch_model.bin.*can run any code"):
        footprint(backend, spec(tiny_models.pickled(tmp_path / "m")))


def test_a_quantised_checkpoint_is_refused_by_name(backend, copy):
    configure(copy, quantization_config={"quant_method": "gptq"})
    with pytest.raises(CannotGovern, match="quantised by gptq"):
        backend.load(spec(copy), CARD)


def test_a_hub_id_is_loaded_from_the_cache_or_named_in_one_line(
    backend, llama, tmp_path, monkeypatch
):
    said = r"org/absent is neither a directory \(there is no /.*/org/absent\) nor a hub id .*hf download org/absent"
    with pytest.raises(LoadFailed, match=said) as error:
        footprint(backend, spec("org/absent"))
    assert len(str(error.value).splitlines()) == 1
    with monkeypatch.context() as lacks:
        lacks.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(LoadFailed, match="pip install 'gpu-console\\[transformers\\]'"):
            footprint(backend, spec("org/absent"))
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    tiny_models.hub_cache(tmp_path, "org/tiny", llama)
    model = backend.load(spec("org/tiny"), CARD)
    assert footprint(backend, spec("org/tiny")).bytes > 0 and backend.unchanged(model)


# -- what else needs the bytes, and what a drop leaves


NEEDS = {
    "a graph": lambda module: module(IDS).logits,
    "a state dict": lambda module: module.state_dict(),
    "a view": lambda module: module.lm_head.weight[:4].detach(),
    "a storage's tensor": lambda module: torch.empty(0).set_(
        module.lm_head.weight.untyped_storage(), 0, (4,)
    ),
}


@pytest.mark.parametrize("need", NEEDS)
def test_weights_that_something_else_needs_are_not_dropped(backend, llama, need):
    """A dropped weight has no bytes. A graph would compute wrong gradients from it in silence."""
    model = backend.load(spec(llama), CARD)
    held = NEEDS[need](backend.value(model))
    assert not backend.droppable(model) and not backend.unchanged(model)
    backend.move(model, HOST)
    assert not backend.droppable(model)
    backend.move(model, CARD)
    del held
    assert backend.unchanged(model)


def test_copies_with_bytes_of_their_own_keep_nothing(backend, llama):
    """A deep copy, `half()` of it and a cloned state dict stay right after a drop of the model."""
    model = backend.load(spec(llama), CARD)
    module = backend.value(model)
    twin, half = copy_of(module), copy_of(module).half()
    cloned = {name: one.clone() for name, one in module.state_dict().items()}
    assert backend.unchanged(model)
    backend.drop(model)
    assert torch.isfinite(half(IDS).logits).all() and twin(IDS).logits.any()
    assert all(torch.equal(one, cloned[name]) for name, one in twin.state_dict().items())


READS = {
    "sum": lambda w: w.sum(),
    "item": lambda w: w[0, 0].item(),
    "repr": repr,
    "tolist": lambda w: w.tolist(),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "half": lambda w: w.half(),
    "transposed": lambda w: w.T,
    "matmul": lambda w: torch.ones(w.shape[0]) @ w,
    "foreach": lambda w: torch._foreach_add([w], 1),
    "deepcopy": copy_of,
    "pickle": pickle.dumps,
    "save": lambda w: torch.save(w, io.BytesIO()),
    "numpy": lambda w: np.asarray(w.detach()),
    "dlpack": lambda w: np.from_dlpack(w),
    "storage": lambda w: w.untyped_storage().tolist(),
    "write": lambda w: w.zero_(),
}


@pytest.mark.parametrize("read", READS)
def test_a_dropped_weight_is_never_readable_as_zeros(backend, llama, read):
    """On a simulated card it is a CPU tensor, whose guard reads as zeros. What it is can be read."""
    model = backend.load(spec(llama), CARD)
    module = backend.value(model)
    weight, before = module.lm_head.weight, module.lm_head.weight.detach().clone()
    kind = type(weight)
    backend.drop(model)
    with pytest.raises(RuntimeError, match=r"m is unloaded .gpu-console.*rt.use\('m'\)"):
        READS[read](weight)
    assert weight.shape == before.shape and weight.dtype == before.dtype and weight.numel()
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad and weight.is_leaf
    again = backend.load(spec(llama), CARD, into=model)
    assert backend.value(again) is module and module.lm_head.weight is weight
    assert type(weight) is kind and torch.equal(weight, before)
