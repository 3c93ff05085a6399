"""Each engine's command line for a lease has only flags of its recorded help (`recorded/engines`) or its own."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_runtime import samples
from gpu_runtime.backends.engines.recipe import LaunchOrder, recipe
from gpu_runtime.backends.llama_cpp.options import LOOKS_FOR_WORK
from gpu_runtime.errors import BadSetting, LoadFailed
from gpu_runtime.facts import ENGINES, ModelSpec, Share
from gpu_runtime.units import GIB
from tests.clock import finished
from tests.engine_stand_in import rejected

CARDS = {"cuda:0": 80 * GIB, "cuda:1": 80 * GIB}


def command(backend: str, **given) -> Any:
    """The command of a model with the launch order `order(backend, **given)`."""
    return recipe(backend).command(order(backend, **given))


def words_of(*lines: str) -> tuple[str, ...]:
    return tuple(word for line in lines for word in line.split())


def llama_server(**given) -> tuple[str, ...]:
    """The words of llama-server's command."""
    return command("llama-server", **{"source": "/m/phi.gguf"} | given).words


def order(
    backend: str,
    *,
    source: str = "org/name",
    gib: tuple[float, ...] = (20,),
    config: dict | None = None,
    name: str = "qwen",
    model_type: str = "llm",
    **options,
) -> LaunchOrder:
    """The launch order of a model with a share of `gib[n]` GiB on card n."""
    shares = tuple(Share(f"cuda:{number}", int(size * GIB)) for number, size in enumerate(gib))
    spec = ModelSpec(name, backend, source=source, model_type=model_type, options=options)
    return LaunchOrder(spec, shares, CARDS, source, 8300, False, "k3y", config or {})


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/opt/{name}")


def test_vllm_takes_its_share_of_one_card_or_two(installed):
    made = command("vllm", context_length=32768, dtype="bfloat16")
    assert made.words == words_of(
        "/opt/vllm serve org/name --host 127.0.0.1 --port 8300 --served-model-name qwen ",
        "--gpu-memory-utilization 0.25 --tensor-parallel-size 1 --max-model-len 32768 --dtype ",
        "bfloat16 --middleware gpu_console_key.Keyed --enable-sleep-mode",
    )
    assert made.environment["VLLM_API_KEY"] == "k3y"
    # vLLM takes the same fraction of each card, so the smaller share determines the fraction.
    words = recipe("vllm").command(order("vllm", gib=(40, 36))).words
    assert words[words.index("--tensor-parallel-size") + 1] == "2"
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.45"


def test_the_routes_with_which_vllm_sleeps_exist_only_where_it_can_sleep(installed):
    """Another one of its development routes runs any method of its workers. On CPUs it refuses the flag."""
    on_cpus = order("vllm")._replace(shares=(Share("sim:0", GIB),), totals={"sim:0": 2 * GIB})
    on_cpus = recipe("vllm").command(on_cpus._replace(simulated=True))
    for made in (on_cpus, command("vllm", sleep=False)):
        assert "--enable-sleep-mode" not in made.words and "--middleware" in made.words
        assert "VLLM_SERVER_DEV_MODE" not in made.environment
    assert command("vllm").environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_vllm_finds_our_middleware_and_the_user_s_own_modules(installed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/home/ann/modules")
    first, *others = command("vllm").environment["PYTHONPATH"].split(":")
    assert [file.name for file in Path(first).glob("*.py")] == ["gpu_console_key.py"]
    assert others == ["/home/ann/modules"]


def test_sglang_keeps_a_copy_of_its_weights_and_no_key_on_its_command_line():
    made = command("sglang", gib=(40, 36), context_length=4096, dtype="bfloat16")
    assert made.words[:3] == (sys.executable, "-P", "-c")
    assert made.words[4:] == words_of(
        "--model-path org/name --host 127.0.0.1 --port 8300 --served-model-name qwen ",
        "--mem-fraction-static 0.45 --tp-size 2 --context-length 4096 --dtype bfloat16 ",
        "--enable-memory-saver --enable-weights-cpu-backup",
    )
    assert made.environment["GPU_ENGINE_KEY"] == "k3y" and "k3y" not in " ".join(made.words)
    assert rejected("sglang", list(made.words)) == []
    assert "--enable-memory-saver" not in command("sglang", sleep=False).words
    with pytest.raises(LoadFailed, match="reads a chat template from a file only"):
        command("sglang", chat_template="{{ messages }}")


def test_vllm_makes_vectors_with_its_pooling_runner(installed):
    """It loaded an embedding model without a head like a model that writes text, and failed."""
    for kind in ("embedding", "reranker"):
        words = recipe("vllm").command(order("vllm", model_type=kind)).words
        assert words[words.index("--runner") + 1] == "pooling"
    assert "--runner" not in recipe("vllm").command(order("vllm")).words
    own = order("vllm", model_type="embedding", runtime_args=["--runner", "auto"])
    assert recipe("vllm").command(own).words.count("--runner") == 1


@given(st.integers(0, 200 * GIB), st.integers(1, 200 * GIB))
def test_the_part_of_a_card_is_within_its_bounds_and_the_share(size, total):
    """The fraction of a card is clamped to 0.01–0.99. Between these bounds it never exceeds the share."""
    from gpu_runtime.backends.engines.recipes import utilization

    model, shares = ModelSpec("a", "vllm"), (Share("cuda:0", size),)
    one = LaunchOrder(model, shares, {"cuda:0": total}, "", 1, False, "")
    part = utilization(one)
    assert 0.01 <= part <= 0.99
    assert part == 0.01 or part * total <= size


def test_user_arguments_are_passed_on_except_those_that_the_lease_decides(installed):
    own = ["--max-model-len", "32768", "--gpu-memory-utilization", "0.9"]
    own += ["--limit-mm-per-prompt", '{"image":10}']
    words = recipe("vllm").command(order("vllm", context_length=4096, runtime_args=own)).words
    assert words.count("--gpu-memory-utilization") == words.count("--max-model-len") == 1
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.25"
    assert words[-4:] == ("--max-model-len", "32768", "--limit-mm-per-prompt", '{"image":10}')


@pytest.mark.parametrize("backend", ["vllm", "llama-server"])
def test_placeholders_get_the_values_of_the_placement(installed, backend):
    """The number of cards and the fraction of each are known only once the model is placed."""
    own = ["--pp={tensor_parallel}", "--part", "{gpu_memory_utilization}", "--side", "{port}1"]
    own += ["--json", '{"port": 1}']
    words = command(backend, gib=(40, 36), runtime_args=own, source="/models/a.gguf").words
    placed = [*words_of("--pp=2 --part 0.45 --side 83001 --json"), '{"port": 1}']
    assert [*words[-7:]] == placed, "the smaller share is the fraction of both cards"


def test_ollama_gets_its_options_from_the_environment(installed):
    """Ollama takes no flags. Each model has a server of its own, which keeps the model loaded."""
    made = command("ollama", source="qwen3:8b", gib=(10, 10), context_length=40960)
    assert made.words == ("/opt/ollama", "serve")
    assert made.environment == {
        "OLLAMA_HOST": "127.0.0.1:8300",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_NUM_PARALLEL": "1",
        "OLLAMA_SCHED_SPREAD": "1",
        "OLLAMA_CONTEXT_LENGTH": "40960",
    }
    assert recipe("ollama").model(order("ollama", source="qwen3:8b")) == "qwen3:8b"
    with pytest.raises(BadSetting, match="f16, q8_0, q4_0 with Ollama"):
        recipe("ollama").command(order("ollama", cache_dtype="bfloat16"))


@pytest.mark.parametrize("given", ["float16", "FP16", "half", "f16"])
def test_the_cache_has_the_engine_s_own_name_of_its_dtype(installed, given):
    """llama-server ends at another name, and Ollama takes f16 without a word."""
    one = order("llama-server", source="/m/phi.gguf", gib=(1,), cache_dtype=given)
    words = recipe("llama-server").command(one).words
    assert words[words.index("--cache-type-k") + 1] == "f16"
    assert words[words.index("--cache-type-v") + 1] == "f16"
    served = recipe("ollama").command(order("ollama", cache_dtype=given)).environment
    assert served["OLLAMA_KV_CACHE_TYPE"] == "f16"


@pytest.mark.parametrize(
    ("source", "listed", "problem"),
    [
        ("qwen3", "qwen3:latest", ""),
        ("box:5000/me/qwen3", "box:5000/me/qwen3:latest", ""),
        ("qwen3:8b", "qwen3:8b", ""),
        ("qwen3", "qwen3:8b", "Ollama does not list it as loaded"),
    ],
)
def test_ollama_lists_a_name_without_a_tag_as_the_latest(source, listed, problem):
    """It looked like a model that was not loaded, and its server was restarted."""
    loaded = {"models": [{"name": listed, "size": 4, "size_vram": 4}]}
    wanted = order("ollama", source=source)._replace(simulated=False)
    assert recipe("ollama").misplaced(wanted, lambda *_: (200, loaded)) == problem


def test_llama_server_gets_layers_context_and_the_split_of_the_shares(installed):
    options = dict(context_length=8192, sequences=2, cache_dtype="q8_0")
    made = command("llama-server", source="/m/phi.gguf", gib=(30, 10), name="phi", **options)
    assert made.words == words_of(
        "/opt/llama-server --model /m/phi.gguf --alias phi --host 127.0.0.1 --port 8300 ",
        "--ctx-size 16384 --n-gpu-layers 999 --parallel 2 --split-mode layer --main-gpu 0 ",
        "--tensor-split 0.75,0.25 --cache-type-k q8_0 --cache-type-v q8_0 --flash-attn on ",
        "--jinja",
    )
    assert made.environment == {"LLAMA_API_KEY": "k3y", **LOOKS_FOR_WORK}


@pytest.mark.parametrize(("layers", "said"), [(-1, "999"), (0, "0"), (20, "20"), (None, "999")])
def test_the_number_of_layers_on_the_card(installed, layers, said):
    given_ = {} if layers is None else {"gpu_layers": layers}
    words = llama_server(**given_)
    assert words[words.index("--n-gpu-layers") + 1] == said


OPTIONS = {
    **{"n_batch": 2048, "n_ubatch": 1024, "n_threads": 4, "n_threads_batch": 8, "seed": 7},
    **{"rope_freq_base": 1e6, "rope_freq_scale": 0.5, "lora_path": "/m/lora.gguf"},
    **{"offload_kqv": False, "use_mmap": True, "use_mlock": False},
}


def flags_of(**options) -> dict[str, str]:
    """The flags that `options` add to the command of llama.cpp's server, with their values."""
    plain, words = llama_server(), llama_server(**options)
    found = {}
    for at, word in enumerate(words):
        if word.startswith("--") and word not in plain:
            value = words[at + 1] if at + 1 < len(words) else ""
            found[word] = "" if value.startswith("--") else value
    return found


def test_llama_server_gets_the_options_of_the_model(installed):
    """They were accepted, checked and then left out of the command."""
    found = flags_of(**OPTIONS, swa_full=True)
    assert found == {
        **{"--batch-size": "2048", "--ubatch-size": "1024", "--threads": "4"},
        **{"--threads-batch": "8", "--seed": "7", "--rope-freq-base": "1000000.0"},
        **{"--rope-freq-scale": "0.5", "--lora": "/m/lora.gguf"},
        **{"--no-kv-offload": "", "--swa-full": ""},
    }
    assert rejected("llama-server", list(found)) == []
    own = flags_of(n_batch=2048, runtime_args=["-b", "512"])
    assert "--batch-size" not in own
    assert flags_of(model_type="embedding", n_batch=2048)["--ubatch-size"] == "2048"


@pytest.mark.parametrize("option", [{"use_mlock": True}, {"lora_scale": 2.0}, {"chat_format": "a"}])
def test_an_option_that_a_server_has_not_is_refused(installed, monkeypatch, option):
    """A flag for it exists in some versions only. `runtime_args` can have it."""
    with pytest.raises(LoadFailed, match=f"llama-server has no option {next(iter(option))}"):
        flags_of(**option)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(LoadFailed, match="has no option swa_full"):
        flags_of(swa_full=True)


def test_without_llama_server_llama_cpp_python_serves_what_it_can(nothing_installed):
    config = {"max_position_embeddings": 2048}
    made = command("llama-server", source="/m/phi.gguf", name="phi", config=config)
    assert made.words == words_of(
        sys.executable,
        "-m llama_cpp.server --model /m/phi.gguf --model_alias phi --host 127.0.0.1 --port ",
        "8300 --n_ctx 2048 --n_gpu_layers -1 --main_gpu 0 --split_mode 0 --interrupt_requests ",
        "false",
    )
    assert made.environment == {"API_KEY": "k3y", **LOOKS_FOR_WORK}
    found = flags_of(**OPTIONS)
    assert found == {f"--{name}": str(value) for name, value in OPTIONS.items()} | {
        **{"--offload_kqv": "false", "--use_mmap": "true", "--use_mlock": "false"}
    }
    # It would silently use the model's own template.
    with pytest.raises(LoadFailed, match="takes no chat template but the model's own"):
        llama_server(chat_template="{{ messages }}")
    with pytest.raises(LoadFailed, match="the file names no pooling type"):
        llama_server(config=NO_POOLING, model_type="embedding")
    words = llama_server(config=CLS_POOLING, model_type="embedding")
    assert words[words.index("--embedding") + 1] == "true"


@pytest.mark.processes
def test_the_flags_of_llama_cpp_python_s_server_are_in_its_help(nothing_installed):
    pytest.importorskip("sse_starlette", reason="llama-cpp-python[server] is not installed")
    words = llama_server(gib=(1, 1), cache_dtype="q8_0", model_type="embedding")
    said = finished([*words[:3], "--help"], check=True).stdout
    flags = {word for word in words if word.startswith("--")}
    assert {"--tensor_split", "--type_k", "--flash_attn", "--embedding"} < flags
    assert flags <= set(re.findall(r"--\w+", said))


def test_a_chat_template_of_the_catalogue_is_on_the_command_line(installed):
    """A chat template cannot be sent with a request: vLLM refuses it there, and llama-server ignores it."""
    for chat, engine, flag in (
        ("{{ messages }}", "vllm", "--chat-template"),
        ("/m/a.jinja", "vllm", "--chat-template"),
        ("{{ messages }}", "llama-server", "--chat-template"),
        ("/m/a.jinja", "llama-server", "--chat-template-file"),
    ):
        words = command(engine, source="/m/phi.gguf", chat_template=chat).words
        assert words[words.index(flag) + 1] == chat


NO_POOLING, CLS_POOLING = {"num_hidden_layers": 2}, {"num_hidden_layers": 2, "pooling_type": 2}


def test_a_text_has_one_vector_also_if_the_file_names_no_pooling_type(installed):
    """llama-server refuses embeddings by such a file, and a file's own type is kept."""
    for embeds in ({"model_type": "embedding"}, {"embedding": True}):
        words = llama_server(config=NO_POOLING, **embeds)
        assert words[words.index("--pooling") + 1] == "mean" and "--embedding" in words
    assert not {"--pooling", "--embedding"} & {*llama_server(config=NO_POOLING)}
    assert "--pooling" not in llama_server(config=CLS_POOLING, model_type="embedding")
    own = ["--pooling", "last"]
    words = llama_server(config=NO_POOLING, model_type="embedding", runtime_args=own)
    assert words.count("--pooling") == 1 and words[-1] == "last"


def test_the_template_for_switches_is_the_model_s_own(installed, tmp_path):
    file = samples.gguf_lm(tmp_path / "phi.gguf")
    assert "message" in recipe("llama-server").template(order("llama-server", source=str(file)))
    # its files are not on this machine
    assert recipe("vllm").template(order("vllm", source="org/name")) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ one }}"}')
    assert recipe("vllm").template(order("vllm", source=str(tmp_path))) == "{{ one }}"
    (tmp_path / "chat_template.jinja").write_text("{{ two }}")
    assert recipe("vllm").template(order("vllm", source=str(tmp_path))) == "{{ two }}"


@pytest.mark.parametrize("name", ["ollama", "diffusers", "llama-server"])
def test_engines_without_template_switches_return_no_template(nothing_installed, name):
    assert recipe(name).template(order(name, source="/m/phi.gguf")) == ""


@pytest.mark.parametrize("engine", ["vllm", "ollama", "llama-server"])
def test_every_flag_is_in_the_engine_s_help(installed, engine):
    """The test uses every option that becomes a flag of the engine."""
    options = dict(context_length=4096, sequences=2, cache_dtype="q8_0", dtype="bfloat16")
    options |= dict(revision="main", trust_remote_code=True, gpu_layers=3)
    options |= dict(model_type="embedding", chat_template="{{ messages }}")
    words = list(command(engine, source="/m/phi.gguf", gib=(30, 30), **options).words[1:])
    assert rejected(engine, words) == []
    assert rejected(engine, [*words, "--gpu-memory"]) == ["--gpu-memory"], "this test can fail"


@pytest.mark.parametrize("name", ENGINES)
def test_no_key_is_on_a_command_line(installed, name):
    """Every user of the machine can read command lines, so a key must not be on one."""
    made = order(name, source="/m/phi.gguf", command=["server", "{port}"])
    assert "k3y" not in " ".join(recipe(name).command(made).words)


@pytest.mark.parametrize("name", ["vllm", "ollama"])
def test_a_missing_engine_is_named_with_what_to_install(nothing_installed, name):
    assert name in recipe(name).missing() and "Install" in recipe(name).missing()


def test_diffusers_runs_our_own_server_program():
    words = command("diffusers", source="/m/sdxl", gib=(8, 8), dtype="float16").words
    assert words[:2] == (sys.executable, "-P") and words[2].endswith("engines/diffusers_app.py")
    assert words[3:] == words_of(
        "--model /m/sdxl --name qwen --socket -1 --device cuda --dtype float16 --balanced",
    )


def reads(schema: dict) -> dict:
    """The description of a path that reads this schema."""
    return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}


CHAT, TEXTS = {"$ref": "#/components/schemas/Chat"}, {"$ref": "#/components/schemas/Texts"}
SCHEMAS = {
    "Chat": {"properties": {"messages": {}, "temperature": {}}},
    "Texts": {"properties": {"input": {}}},
}
OPENAPI = {
    "paths": {
        "/v1/chat/completions": reads(CHAT),
        "/v1/embeddings": reads(
            {"anyOf": [TEXTS, {"type": "object", "properties": {"messages": {}}}]}
        ),
        "/v1/completions": {"post": {}},
    },
    "components": {"schemas": SCHEMAS},
}


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        (
            (200, OPENAPI),
            {"chat": {"messages", "temperature"}, "embeddings": {"input", "messages"}},
        ),
        ((404, "Not Found"), {}),
        ((0, None), {}),
        ((200, "no JSON"), {}),
    ],
)
def test_vllm_tells_which_fields_it_reads(answer, fields):
    """It ignores other fields, and only logs them. Without a document nothing is known."""
    asked = []

    def send(method, path, body):
        asked.append((method, path))
        return answer

    assert recipe("vllm").request_fields(order("vllm"), send) == fields
    assert asked == [("GET", "/openapi.json")]


def test_the_fields_of_the_other_servers_are_those_of_their_code(installed):
    native = recipe("llama-server").request_fields(order("llama-server"), None)
    assert {"temperature", "repeat_penalty", "tools"} <= native["chat"]
    assert "repetition_penalty" not in native["chat"] and "dimensions" not in native["embeddings"]
    ollama = recipe("ollama").request_fields(order("ollama"), None)
    assert "top_k" not in ollama["chat"] and "dimensions" in ollama["embeddings"]
