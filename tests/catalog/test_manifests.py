"""Files that describe models: the formats of three other projects, and the limits of every field."""

import json
from contextlib import suppress

import pytest

from gpu_runtime.arguments import FIELDS, OPTIONS, read_options
from gpu_runtime.backends.registry import open_backend
from gpu_runtime.catalog.documents import read
from gpu_runtime.catalog.fields import CatalogEntry, notes, spec_of
from gpu_runtime.catalog.files import API_VERSION, manifests
from gpu_runtime.devices.probe import open_probe
from gpu_runtime.errors import BadDocument, LoadFailed
from gpu_runtime.facts import Share
from gpu_runtime.settings import Settings
from gpu_runtime.units import GIB, MIB

SERVER = "runtime: program, command: [s, '{port}']"
# Examples from Helix ("Multi-GPU Scheduling"), Kitchen Brigade ("GPU Allocation Semantics") and Model Boss.
HELIX = """\
# Single-GPU Model (helix model apply -f) - supports Model, Agent, or AIApp kinds
apiVersion: model.aispec.org/v1alpha1
kind: Model  # or "Agent" or "AIApp"
metadata:
  name: qwen3:8b
spec:
  id: qwen3:8b
  name: Qwen3 8B
  type: chat
  runtime: ollama
  memory: "10GB"  # Human-readable format: 10GB, 10GiB, 10G all supported
  context_length: 40960
  description: Latest generation Qwen model - 4bit quantized, 40K context
  enabled: true
---
apiVersion: model.aispec.org/v1alpha1
kind: Agent  # Alternative kind - same as Model
metadata: {name: gpt-oss:120b}
spec: {id: gpt-oss:120b, type: chat, runtime: ollama, memory: 80GB, context_length: 131072}
---
apiVersion: model.aispec.org/v1alpha1
kind: AIApp  # Alternative kind - same as Model
metadata:
  name: qwen2.5-vl-7b
spec:
  id: Qwen/Qwen2.5-VL-7B-Instruct
  runtime: vllm
  memory: "39GiB"
  context_length: 32768
  runtime_args: ["--trust-remote-code", "--max-model-len", "32768", "--limit-mm-per-prompt", '{"image":10}']
"""
KITCHEN = """\
models:
  phi-4:
    path: "phi-4-Q4_K_M.gguf"
    context_length: 16384
    gpu_layers: -1  # All layers on GPU
"""
BOSS = """\
models:
  siglip2: {vram_mb: 2048, pin: true, category: vision}
  sdxl: {vram_mb: 9000, category: diffusion, path: sdxl}
  qwen-35b: {vram_mb: 22000, backend: llama-server, category: llm, path: qwen.gguf}
"""


def entries(text: str) -> dict[str, CatalogEntry]:
    return {
        made.name: CatalogEntry(made.name, made.body)
        for made in manifests(read(text.encode(), "f.yaml"), "f.yaml")
    }


def spec(fields: str, **settings):
    """The spec of one model with these fields, written in one line."""
    (entry,) = entries(f"models: {{m: {{{fields}}}}}").values()
    return spec_of(entry, Settings.load(**settings))


def wrong(text: str) -> BadDocument:
    with pytest.raises(BadDocument) as caught:
        entries(text)
    return caught.value


# -- the shapes ------------------------------------------------------------------------------------


READ = {
    "qwen3:8b": ("ollama", 10 * 10**9, "llm", 40960),
    "gpt-oss:120b": ("ollama", 80 * 10**9, "llm", 131072),
    "qwen2.5-vl-7b": ("vllm", 39 * GIB, "other", 32768),
    "phi-4": ("llama_cpp", None, "other", 16384),
    "siglip2": ("transformers", 2048 * MIB, "vision", None),
    "sdxl": ("diffusers", 9000 * MIB, "diffusion", None),
    "qwen-35b": ("llama-server", 22000 * MIB, "llm", None),
    "bare": ("transformers", 7, "other", None),
    "Org/in-a-list": ("transformers", GIB, "other", None),
}


def test_the_formats_of_three_projects_a_bare_manifest_and_json_are_read_from_one_file():
    """If a manifest names no backend, its category or its file decides. `pin` becomes `keep`."""
    bare = '{"name": "bare", "memory": 7}\n---\n[{"id": "Org/in-a-list", "size": "1G"}]\n'
    boss = BOSS.removeprefix("models:\n")
    text = "---\n".join([HELIX, KITCHEN + boss, bare])
    found = {name: spec_of(entry, Settings.load()) for name, entry in entries(text).items()}
    assert {
        name: (s.backend, s.size, s.model_type, s.options.get("context_length"))
        for name, s in found.items()
    } == READ
    assert [name for name, s in found.items() if s.keep] == ["siglip2"]
    assert found["qwen2.5-vl-7b"].source == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert (found["phi-4"].source, found["phi-4"].options["gpu_layers"]) == (
        "phi-4-Q4_K_M.gguf",
        -1,
    )


def test_a_manifest_is_stored_unchanged():
    """Fields that have no meaning here are kept, such as labels, a status, and fields of other tools."""
    text = (
        f"apiVersion: {API_VERSION}\nkind: Agent\nmetadata: {{name: a, labels: {{team: x}}}}\n"
        "spec: {memory: 10GB, colour: red, x-memroy: 1}\nstatus: {phase: ready}\n"
    )
    [document] = read(text.encode(), "f.yaml")
    assert entries(text)["a"].body == document.value


MODEL = f"apiVersion: {API_VERSION}\nkind: Model\n"


@pytest.mark.parametrize(
    ("text", "line", "field", "message"),
    [
        ("apiVersion: v1\nkind: Model\n", 1, "apiVersion", "'v1' is not supported"),
        (f"apiVersion: {API_VERSION}\nkind: Pod\n", 2, "kind", "must be Model, Agent or AIApp"),
        (f"{MODEL}metadata: {{}}\n", 3, "metadata", "name is missing"),
        (f"{MODEL}metadata:\n  name: 7\n", 4, "metadata.name", "put it in quotes"),
        (f"{MODEL}metadata: {{name: a}}\nspec: 3\n", 4, "spec", "mapping of fields"),
        ("models: 3\n", 1, "models", "a mapping of names, or a list"),
        ("models:\n  - memory: 1\n", 2, "models[0]", "its name is missing"),
        ("models:\n  a: 10GB\n", 2, "models.a", "mapping of fields"),
        ("models:\n  a@b: {}\n", 2, "models.a@b", "'@'"),
        ("models: {a: {memory: 1}}\ndefaults: {}\n", 2, "defaults", "only `models` is read here"),
        ("modles:\n  a: {memory: 1}\n", 1, "", "Did you mean models"),
        ("hello\n", 1, "", "this is no model"),
        ("models: {}\n", 1, "", "there is no model in it"),
        (
            "models: [{name: a}]\n---\nmodels: {a: {memory: 1}}\n",
            3,
            "models.a",
            "appears twice in this file; the first time in line 1",
        ),
    ],
)
def test_an_invalid_shape_is_reported_with_file_line_and_field(text, line, field, message):
    error = wrong(text)
    assert (error.file, error.line, error.field) == ("f.yaml", line, field)
    assert message in str(error)


# -- the fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("10GB", 10**10),
        ("10GiB", 10 * GIB),
        ("10G", 10 * GIB),
        ("10 GiB", 10 * GIB),
        ("8589934592", 8589934592),
        ("1.5GB", 1_500_000_000),
        ("512MiB", 512 * MIB),
    ],
)
def test_sizes_are_decimal_binary_or_bytes(written, size):
    assert spec(f"memory: {written}").size == spec(f"size: {written}").size == size


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ("memory: 10XB", "memory", "'10XB' is not a size"),
        ("memory: -1", "memory", "not a size"),
        ("memory: 0", "memory", "cannot be 0"),
        ("memory: '0'", "memory", "cannot be 0"),
        ("memory: true", "memory", "not a size"),
        ("memory: [1]", "memory", "not a size"),
        ("vram_mb: lots", "vram_mb", "not a number of MiB"),
        ("vram_mb: 0", "vram_mb", "not a number of MiB"),
        ("context_length: 0", "context_length", "greater than 0"),
        ("context_length: 1.5", "context_length", "whole number"),
        ("gpu_layers: -2", "gpu_layers", "greater than or equal to -1"),
        ("gpu_layers: many", "gpu_layers", "whole number"),
        ("gpu_layers: true", "gpu_layers", "whole number"),
        ("gpus: 0", "gpus", "how many cards"),
        ("gpus: []", "gpus", "how many cards"),
        ("gpus: 4, max_tensor_parallel: 2", "gpus", "more than max_tensor_parallel"),
        ("gpu_memory: {}", "gpu_memory", "names no card"),
        ("gpu_memory: {0: 1XB}", "gpu_memory", "'1XB' is not a size"),
        ("max_tensor_parallel: 0", "max_tensor_parallel", "greater than 0"),
        ("layout: diagonal", "layout", "'auto'"),
        ("dtype: bfloat61", "dtype", "did you mean bfloat16"),
        ("dtype: 7", "dtype", "must be text"),
        ("importance: vital", "importance", "none of urgent"),
        ("importance: 0", "importance", "none of urgent"),
        ("keep: perhaps", "keep", "true or false"),
        ("keep_alive: soon", "keep_alive", "not a duration"),
        ("enabled: 7", "enabled", "true or false"),
        ("type: chta", "type", "did you mean chat"),
        ("runtime: vlm", "runtime", "did you mean vllm"),
        ("backend: ''", "backend", "must be text"),
        ("path: 3", "path", "must be text"),
        ("path: ''", "path", "empty"),
        ('revision: "a\\nb"', "revision", "printable characters"),
        ("runtime_args: --max-model-len 3", "runtime_args", "list of words"),
        ("runtime_args: [--max-model-len, many]", "runtime_args", "not a number of tokens"),
        ("runtime_args: [--dtype]", "runtime_args", "--dtype needs a value"),
        (f"context_length: '{10**400}'", "context_length", "less than or equal to"),
        (f"max_tensor_parallel: '{10**400}'", "max_tensor_parallel", "less than or equal to"),
        (f"gpu_layers: {2**31}", "gpu_layers", "less than or equal to 2147483647"),
        ("gpu_fraction_factor: 0", "gpu_fraction_factor", "greater than 0"),
        ("fraction_largest_possible: 1.5", "fraction_largest_possible", "less than or equal to 1"),
        ("sleep: perhaps", "sleep", "true or false"),
        ("runtime: vllm, sleep: /sleep", "sleep", "unless the backend is program"),
        ("runtime: vllm, wake: /wake", "wake", "only the backend program"),
        ("command: [s, '{port}']", "command", "only the backend program"),
        ("runtime: program, command: []", "command", "a list of words"),
        ("runtime: program, command: [server, '8000']", "command", "with {port}"),
        ("runtime: program, command: '{port}'", "command", "a list of words"),
        (f"{SERVER}, sleep: true", "sleep", "a path on its port"),
        (f"{SERVER}, sleep: sleep", "sleep", "true or false"),
        (f"{SERVER}, sleep: /s, wake: http://h/w", "wake", "a path on its"),
        (f"{SERVER}, sleep: /s, wake: [], asleep: /a", "wake", "or a command"),
        (f"{SERVER}, health: ready", "health", "a path on its port"),
        ("memory: 10GB, size: 11GB", "size", "memory and size mean the same"),
        ("keep: true, pin: false", "pin", "keep and pin mean the same"),
        ("runtime: vllm, backend: ollama", "backend", "runtime and backend mean the same"),
        ("memroy: 10GB", "memroy", "did you mean memory"),
        ("context-length: 3", "context-length", "did you mean context_length"),
        ("Memory: 10GB", "Memory", "did you mean memory"),
    ],
)
def test_an_invalid_field_is_reported_with_file_line_and_field(fields, field, message):
    error = wrong(f"models:\n  other: {{memory: 1}}\n  m:\n    {{{fields}}}\n")
    assert (error.line, error.field) == (4, f"models.m.{field}") and message in str(error)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ("runtime: program", "command"),
        (f"{SERVER}, sleep: /s", "wake"),
        (f"{SERVER}, asleep: /a", "sleep"),
    ],
)
def test_what_a_program_lacks_is_named_with_the_line_of_the_model(fields, field):
    error = wrong(f"models:\n  other: {{memory: 1}}\n  m:\n    {{{fields}}}\n")
    assert (error.line, error.field) == (3, f"models.m.{field}") and "given with" in str(error)


def test_all_errors_are_reported_at_once():
    """In the order of their lines. A name that is there three times is named with its first line."""
    error = wrong("models:\n  a:\n    keep: 3\n    memory: x\n  b:\n    memroy: 1\n")
    assert (error.line, [other.line for other in error.others]) == (3, [4, 6])
    assert all(f"line {line}" in str(error) for line in (3, 4, 6))
    error = wrong("models:\n - name: a\n - name: a\n - name: a\n")
    assert str(error).count("the first time in line 2") == 2


def test_synonyms_with_the_same_value_are_accepted():
    assert spec("memory: 10GiB, size: 10G, runtime: llama.cpp, backend: llamacpp").size == 10 * GIB


def test_fields_become_a_spec():
    made = spec(
        "path: /m, memory: 10GB, type: embedding, quantization: int8, importance: high, pin: true, keep_alive: 10m, "
        "layout: balanced, dtype: bf16, gpus: [0, 'cuda:1'], max_tensor_parallel: 2, gpu_memory: 20GiB, "
        "gpu_fraction_factor: 3.0, fraction_largest_possible: 0.8, enabled: false, revision: main"
    )
    assert (made.source, made.model_type, made.quantization) == ("/m", "embedding", "int8")
    assert (made.importance, made.keep, made.keep_alive) == (5, True, 600.0)
    assert (made.layout, made.devices, made.enabled) == ("balanced", ("0", "cuda:1"), False)
    assert made.options == {"dtype": "bfloat16", "revision": "main"}
    assert made.placement == {
        "most_cards": 2,
        "card_bytes": 20 * GIB,
        "factor": 3.0,
        "largest_fraction": 0.8,
    }


def test_a_number_of_gpus_is_the_number_of_cards():
    for fields in ("gpus: 2", "gpus: 2, max_tensor_parallel: 2", "gpus: 2, max_tensor_parallel: 4"):
        assert spec(fields).placement == {"least_cards": 2, "most_cards": 2}
    assert spec("gpu_memory: {0: 1GiB}").placement == {"card_bytes": {"0": GIB}}


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ("path: /p, source: /p, id: i", "/p"),
        ("source: s, id: i", "s"),
        ("id: Org/i", "Org/i"),
        ("memory: 1", "m"),
    ],
)
def test_the_source_is_the_path_else_the_id_else_the_name(fields, source):
    assert spec(fields).source == source


def test_values_that_look_like_none_are_values():
    """`keep: false` contradicts `pin: true`, `gpu_layers: 0` is the CPU, and a flag may be switched off."""
    assert wrong("models: {m: {keep: false, pin: true}}").field == "models.m.pin"
    assert spec("gpu_layers: 0", inference_gpu_layers=9).options["gpu_layers"] == 0
    assert spec("memory: 1").enabled and not spec("enabled: false").enabled
    kept = spec("runtime_args: {enforce_eager: false, seed: 0}").options["runtime_args"]
    assert kept == ["--seed", "0"]
    for off in ("false", "0", "no"):
        trust = f"runtime_args: ['--trust-remote-code={off}']"
        assert "trust_remote_code" not in spec(trust, gpu_trust_remote_code=True).options


@pytest.mark.parametrize(
    ("written", "becomes"),
    [
        ("chat", "llm"),
        ("embeddings", "embedding"),
        ("rerank", "reranker"),
        ("image", "diffusion"),
        ("Vision", "vision"),
        ("tts", "other"),
    ],
)
def test_a_type_is_a_known_one_or_other(written, becomes):
    """Helix calls this field `type`, and Model Boss calls it `category`. An unknown type becomes `other`."""
    assert spec(f"type: {written}").model_type == spec(f"category: {written}").model_type == becomes


SAMPLES = (True, 3, "float16", "layer", ["--seed", "1"])


@pytest.mark.parametrize("name", [name for name in OPTIONS if not FIELDS[name].only_in])
def test_an_option_in_a_file_is_the_option_of_register(name):
    """A row of the table is enough: a file and `register` give the backend the same value."""
    rule = FIELDS[name].rule
    for value in SAMPLES:
        with suppress(Exception):
            expected = rule.read(value)
            break
    backends = FIELDS[name].backends or ("fake", "vllm")
    for backend in (one for one in backends if one != "program"):  # see the next test
        made = spec(f"backend: {backend}, {name}: {value}", gpu_trust_remote_code=True)
        assert made.options == read_options(backend, {name: value}) == {name: expected}


def test_a_program_has_its_command_and_how_it_sleeps():
    """A file and `register` give its backend the same options."""
    fields = {
        "command": ["server", "--port", "{port}"],
        "health": "/ready",
        "sleep": "/unload?all=1",
        "wake": ["ctl", "load", "{port}"],
        "asleep": "/state",
    }
    made = spec(f"runtime: program, memory: 1GiB, {json.dumps(fields)[1:-1]}")
    assert made.options == read_options("program", fields) == fields
    assert made.source == "" and made.may_sleep
    assert not spec(SERVER).may_sleep


def test_a_program_in_a_file_that_others_can_change_is_not_started(tmp_path):
    """Its command would run with the rights of whoever uses the model."""
    file = tmp_path / "shared" / "models.yaml"
    file.parent.mkdir()
    text = "models:\n  m: {runtime: program, memory: 1GiB, command: [s, '{port}']}\n"
    file.write_text(text)
    [manifest] = manifests(read(text.encode(), str(file)), str(file))
    entry = CatalogEntry("m", manifest.body, str(file))
    assert "refused" not in spec_of(entry, Settings.load()).options
    file.parent.chmod(0o777)
    backend = open_backend("program", open_probe("sim:1GiB,host:1GiB"))
    with pytest.raises(LoadFailed, match="can be changed by other users"):
        backend.load(spec_of(entry, Settings.load()), (Share("sim:0", 1),))


# -- settings --------------------------------------------------------------------------------------


def test_layers_and_backend_default_to_the_settings():
    settings = {"inference_gpu_layers": 0, "inference_backend": "llamacpp"}
    silent = spec("path: a.gguf", **settings)
    own = spec("path: a.gguf, gpu_layers: 20, backend: vllm", **settings)
    assert (silent.options["gpu_layers"], silent.backend) == (0, "llama_cpp")
    assert (own.options["gpu_layers"], own.backend) == (20, "vllm")


def test_a_placeholder_is_no_value_of_a_field():
    made = spec("runtime_args: [--tensor-parallel-size, '{tensor_parallel}', --seed=1]")
    assert "most_cards" not in made.placement
    assert made.options["runtime_args"][1] == "{tensor_parallel}"


def test_trust_needs_both_the_file_and_the_setting():
    """A file from another author cannot make this process run code, unless the setting allows it too."""
    words = "runtime_args: [--trust-remote-code, --seed, '1']"
    for fields, trusted, told in (
        (words, False, ["--seed", "1"]),
        (words, True, ["--trust-remote-code", "--seed", "1"]),
        ("trust_remote_code: true", False, None),
        ("trust_remote_code: true", True, None),
        ("memory: 1", True, None),
    ):
        options = spec(fields, gpu_trust_remote_code=trusted).options
        assert options.get("trust_remote_code", False) is (trusted and "memory" not in fields)
        assert options.get("runtime_args") == told


@pytest.mark.parametrize(
    "smuggled",
    ["['--trust-remote-code=true']", "['--Trust_Remote-Code']", "{trust_remote_code: true}"],
)
def test_trust_is_not_passed_on_in_another_spelling(smuggled):
    fields = f"runtime_args: {smuggled}"
    assert spec(fields).options.get("runtime_args") == []
    assert spec(fields, gpu_trust_remote_code=True).options["trust_remote_code"] is True


# -- an engine's arguments -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what", "value"),
    [
        ("[--max-model-len, '8192']", "context_length", 8192),
        ("[--max-model-len=8k]", "context_length", 8000),
        ("[--max-model-len=8K]", "context_length", 8192),
        ("[--max-model-len=1M]", "context_length", 2**20),
        ("[--kv-cache-dtype, auto, --seed, '1']", "cache_dtype", None),
        ("[--kv-cache-dtype, fp8]", "cache_dtype", "fp8"),
        ("{type_k: q8_0}, type_v: q8_0", "cache_dtype", "q8_0"),
        ("[-c, 4096]", "context_length", 4096),
        ("[-ngl, -1]", "gpu_layers", -1),
        ("[--dtype, half]", "dtype", "float16"),
        ("{max_model_len: 8192, enforce_eager: true}", "context_length", 8192),
    ],
)
def test_an_argument_overrides_the_field_beside_it(words, what, value):
    fields = "context_length: 1, gpu_layers: 7, dtype: float32"
    assert spec(f"{fields}, runtime_args: {words}").options.get(what) == value


def test_arguments_without_an_effect_are_kept_and_noted():
    (entry,) = entries(
        "models: {m: {runtime: tgi, memory: 1, "
        "runtime_args: [--seed, '1', --gpu-memory-utilization, '0.9'], colour: red}}"
    ).values()
    said = " | ".join(notes(entry, Settings.load()))
    assert "unknown here, and kept: colour" in said and "engine's command line: --seed" in said
    assert "decided by the placement, and kept: --gpu-memory-utilization" in said
    assert "this version has no backend tgi" in said
    kept = spec_of(entry, Settings.load()).options["runtime_args"]
    assert kept == ["--seed", "1", "--gpu-memory-utilization", "0.9"]
