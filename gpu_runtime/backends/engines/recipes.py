"""The recipes of all engines: llama.cpp's servers, vLLM, SGLang, Ollama, diffusers and any other program."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from ...errors import BadSetting, LoadFailed, NotAModel
from ...facts import Evidence, ModelSpec
from ...units import show_bytes
from ..formats import sources
from ..llama_cpp.options import (
    PASSED_TO_LLAMA,
    cache_type,
    context_tokens,
    flash_attention,
    gguf_evidence,
    gguf_file,
    gpu_layers,
    llama_arguments,
    waiting_environment,
)
from ..processes.engine import python_file
from .recipe import (
    Command,
    LaunchOrder,
    Recipe,
    RequestFields,
    SendRequest,
    StateChange,
    fields_in_openapi,
    filled,
    has_flag,
    told,
    user_arguments,
    utilization,
)

# -- llama.cpp: its own server, `llama-server`, or else the server of llama-cpp-python
#
# If the command `llama-server` is missing, `python -m llama_cpp.server` starts the server of llama-cpp-python.
#
# Sources: llama.cpp, tools/server: README, server-schema.cpp, server-chat.cpp (as in llama-cpp-python 0.3.36);
# llama-cpp-python, server/settings.

_FLAGS = {  # an option of the model -> the flags of llama-server, the usual one first
    "n_batch": ("--batch-size", "-b"),
    "n_ubatch": ("--ubatch-size", "-ub"),
    "n_threads": ("--threads", "-t"),
    "n_threads_batch": ("--threads-batch", "-tb"),
    "rope_freq_base": ("--rope-freq-base",),
    "rope_freq_scale": ("--rope-freq-scale",),
    "seed": ("--seed", "-s"),
    "lora_path": ("--lora",),
}
_SWITCHES = {"offload_kqv": (False, "--no-kv-offload"), "swa_full": (True, "--swa-full")}
# Options without a flag in every version of the server. Each has the value that needs no flag.
_NATIVE_LACKS = {
    **{"use_mmap": True, "use_mlock": False, "logits_all": False},
    **{"lora_scale": 1.0, "chat_format": None},
}
_PYTHON_LACKS = {"swa_full": False, "lora_scale": 1.0}
ALL_LAYERS = "999"  # every version accepts a number that is too large; only newer ones accept `all`

_SAMPLING_FIELDS = """adaptive_decay adaptive_target backend_sampling cache_prompt dry_allowed_length dry_base
    dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range frequency_penalty grammar
    id_slot ignore_eos json_schema logit_bias logprobs lora max_completion_tokens max_tokens min_keep min_p mirostat
    mirostat_eta mirostat_tau n n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs post_sampling_probs
    presence_penalty repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers seed
    sse_ping_interval stop stream stream_options t_max_predict_ms t_max_prompt_ms temperature timings_per_token top_k
    top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold"""
_CHAT_FIELDS = """messages tools tool_choice parallel_tool_calls parse_tool_calls response_format top_logprobs
    chat_template_kwargs add_generation_prompt continue_final_message reasoning_format reasoning_effort
    reasoning_budget_tokens reasoning_budget_message reasoning_control thinking_budget_tokens"""
_NATIVE_FIELDS = {
    "chat": frozenset(f"model {_CHAT_FIELDS} {_SAMPLING_FIELDS}".split()),
    "completions": frozenset(f"model prompt {_SAMPLING_FIELDS}".split()),  # it echoes no prompt
    "embeddings": frozenset("model input content encoding_format embd_normalize".split()),
}


class LlamaServer(Recipe):
    """Starts `llama-server`, or the server of llama-cpp-python."""

    LAYOUT = "proportional"

    def evidence(self, spec: ModelSpec) -> Evidence:
        return gguf_evidence(spec)

    def source(self, spec: ModelSpec) -> str:
        return str(gguf_file(spec))

    def missing(self) -> str:
        if shutil.which("llama-server") or importlib.util.find_spec("llama_cpp"):
            return ""
        return (
            "neither llama-server nor llama-cpp-python is installed.\n"
            "  Install one:  pip install 'gpu-console[llama]'"
        )

    def health_path(self, spec: ModelSpec) -> str:
        """The path that shows whether the server is ready.

        llama-server answers 503 at `/health` while it loads; at other paths some versions answer
        200. llama-cpp-python's server has no `/health`. It listens only once the model is loaded,
        so any path that needs no key will do.
        """
        return "/health" if shutil.which("llama-server") else "/openapi.json"

    def command(self, order: LaunchOrder) -> Command:
        native = shutil.which("llama-server")
        return _native(order, native) if native else _python(order)

    def template(self, order: LaunchOrder) -> str:
        """The template in the model file; empty for llama-cpp-python's server, which reads no switches."""
        if not shutil.which("llama-server"):
            return ""
        return sources.template(order.source, order.spec.name) or ""

    def request_fields(self, order: LaunchOrder, send: SendRequest) -> RequestFields:
        """The fields that the server's code reads. It ignores any other field."""
        return _NATIVE_FIELDS if shutil.which("llama-server") else fields_in_openapi(send)


def _llama_arguments(order: LaunchOrder) -> dict[str, Any]:
    return llama_arguments(order.spec, order.shares, order.source, dict(order.config), None)


def _native(order: LaunchOrder, executable: str) -> Command:
    """The command of `llama-server`. A flag is left out if the user's own arguments set it."""
    spec, own = order.spec, user_arguments(order)
    layers = gpu_layers(spec)
    words = ["--model", order.source, "--alias", spec.name]
    words += ["--host", "127.0.0.1", "--port", str(order.port)]
    if not has_flag(own, "--ctx-size", "-c"):
        words += ["--ctx-size", str(context_tokens(spec, dict(order.config)))]
    if not has_flag(own, "--n-gpu-layers", "--gpu-layers", "-ngl"):
        words += ["--n-gpu-layers", ALL_LAYERS if layers < 0 else str(layers)]
    if not has_flag(own, "--parallel", "-np"):
        words += ["--parallel", str(spec.options.get("sequences") or 1)]
    arguments = _llama_arguments(order)
    if len(order.shares) > 1:
        split = ",".join(f"{part:g}" for part in arguments["tensor_split"])
        words += ["--split-mode", spec.options.get("split_mode", "layer")]
        words += ["--main-gpu", str(arguments["main_gpu"]), "--tensor-split", split]
    dtype = cache_type(spec)
    if dtype and not has_flag(own, "--cache-type-k", "-ctk"):
        words += ["--cache-type-k", dtype, "--cache-type-v", dtype]
    if flash_attention(spec) and not has_flag(own, "--flash-attn", "-fa"):
        words += ["--flash-attn", "on"]
    if arguments["embedding"]:
        words += ["--embedding"]
        if "pooling_type" in arguments and not has_flag(own, "--pooling"):
            words += ["--pooling", "mean"]
    words += _option_flags(order, arguments, own)
    # Without --jinja, llama-server uses only a few built-in templates, and ignores the switches
    # that a request sets for a template.
    if not has_flag(own, "--jinja", "--no-jinja"):
        words += ["--jinja"]
    chat = spec.options.get("chat_template")
    if chat and not has_flag(own, "--chat-template", "--chat-template-file"):
        words += ["--chat-template" if "{" in chat else "--chat-template-file", chat]
    environment = {"LLAMA_API_KEY": order.key, **waiting_environment()}
    return Command((executable, *words, *own), environment)


def _option_flags(order: LaunchOrder, arguments: dict[str, Any], own: tuple[str, ...]) -> list[str]:
    """The flags of llama-server for the model's other `arguments`, except for flags in `own`.

    Raises LoadFailed for an option that the server has not.
    """
    _require_options(order, arguments, _NATIVE_LACKS, "llama-server")
    words = []
    for name, flags in _FLAGS.items():
        if name in arguments and not has_flag(own, *flags):
            words += [flags[0], str(arguments[name])]
    for name, (value, flag) in _SWITCHES.items():
        if arguments.get(name) is value and not has_flag(own, flag):
            words.append(flag)
    return words


def _require_options(
    order: LaunchOrder, arguments: dict[str, Any], lacks: dict[str, Any], server: str
) -> None:
    for name, neutral in lacks.items():
        if arguments.get(name, neutral) != neutral:
            advice = "Leave it out, or use the backend llama_cpp."
            raise _refused(order, f"{server} has no option {name}", advice)


def _python(order: LaunchOrder) -> Command:
    """The command of llama-cpp-python's server.

    This server takes no custom chat template, and no embedding model whose file names no pooling
    type. For both, LoadFailed is raised.
    """
    arguments = _llama_arguments(order)
    if order.spec.options.get("chat_template"):
        raise _only_native(order, "takes no chat template but the model's own")
    if "pooling_type" in arguments:
        why = "makes no single vector of a text: the file names no pooling type"
        raise _only_native(order, why)
    words = ["--model", order.source, "--model_alias", order.spec.name]
    words += ["--host", "127.0.0.1", "--port", str(order.port)]
    for name in ("n_ctx", "n_gpu_layers", "main_gpu", "split_mode"):
        words += [f"--{name}", str(arguments[name])]
    if "tensor_split" in arguments:
        words += ["--tensor_split", *(f"{part:g}" for part in arguments["tensor_split"])]
    for name in ("type_k", "type_v"):
        if name in arguments:
            words += [f"--{name}", str(arguments[name])]
    for name in ("flash_attn", "embedding"):
        if arguments[name]:
            words += [f"--{name}", "true"]
    _require_options(order, arguments, _PYTHON_LACKS, "llama-cpp-python's server")
    for name in PASSED_TO_LLAMA:
        if name in arguments and name not in _PYTHON_LACKS:
            value = arguments[name]
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    # By default, a call that arrives during another call's stream ends that stream, silently.
    words += ["--interrupt_requests", "false"]
    program = (sys.executable, "-m", "llama_cpp.server")
    return Command((*program, *words), {"API_KEY": order.key, **waiting_environment()})


def _only_native(order: LaunchOrder, why: str) -> LoadFailed:
    advice = "Install llama-server, or leave out its runtime: the backend llama_cpp can do it."
    return _refused(order, f"llama-cpp-python's server {why}", advice)


def _refused(order: LaunchOrder, why: str, advice: str) -> LoadFailed:
    return LoadFailed(
        f"{order.spec.name} cannot be loaded: {why}.\n  {advice}",
        name=order.spec.name,
        source=order.source,
        why=why,
        mistake=True,
    )


# -- vLLM: the server `vllm serve`
#
# When vLLM starts, it takes a fixed part of each card. It keeps this part even if the model needs less.
#
# vLLM checks its key for some paths only: some versions for those below /v1. The routes with which it sleeps are among
# its development routes, and another one of these runs any method of its workers. So a middleware of ours, which vLLM
# loads, demands the key for every path but the health check.
#
# Sleep of level 1 keeps the weights in host memory. Level 2 drops them, and then the server answers nonsense until they
# are loaded again, so it is not used. Without CUDA, vLLM refuses `--enable-sleep-mode`.
#
# vLLM and SGLang read CUDA_VISIBLE_DEVICES as numbers, to look at their cards without CUDA. vLLM ends at a UUID
# (vllm-project/vllm#13815, #46132), and SGLang on several cards (its custom_all_reduce.py).
#
# Sources: vLLM, CLI reference, `vllm serve`; entrypoints/serve/sleep/api_router.py; device_allocator/cumem.py;
# docs/usage/security.md.

IN_VLLM = Path(__file__).with_name("in_vllm")  # modules that vLLM imports

_OPTION_FLAGS = {
    "context_length": "--max-model-len",
    "dtype": "--dtype",
    "revision": "--revision",
    "cache_dtype": "--kv-cache-dtype",
}


def _own_flags(
    options: dict[str, Any], flags: dict[str, str], user_words: tuple[str, ...]
) -> list[str]:
    """The flags of vLLM or SGLang for the model's `options`, except those in the user's own words."""
    words = []
    for option, flag in flags.items():
        if options.get(option) is not None and not has_flag(user_words, flag):
            words += [flag, str(options[option])]
    if options.get("trust_remote_code") and not has_flag(user_words, "--trust-remote-code"):
        words += ["--trust-remote-code"]
    return words


class Vllm(Recipe):
    """Starts `vllm serve`."""

    LAYOUT = "balanced"  # tensor parallelism: equal parts
    SLEEPS_ON = "cuda"
    OWN_TEMPLATE = LISTS_FIELDS = CARDS_BY_NUMBER = True

    def missing(self) -> str:
        if shutil.which("vllm"):
            return ""
        return "there is no command vllm here.\n  Install it:  pip install vllm"

    def sleep(self, change: StateChange) -> str:
        if why := told(change.send, "/sleep?level=1"):
            return why
        return "" if _vllm_sleeps(change.send) else "it says that it does not sleep"

    def wake(self, change: StateChange) -> str:
        if why := told(change.send, "/wake_up"):
            return why
        return "it says that it still sleeps" if _vllm_sleeps(change.send) else ""

    def command(self, order: LaunchOrder) -> Command:
        """The command for `order`. A flag is left out if the user's own arguments set it."""
        own = user_arguments(order)
        options = {"context_length": order.config.get("context_at_load"), **order.spec.options}
        words = ["serve", order.source, "--host", "127.0.0.1", "--port", str(order.port)]
        words += ["--served-model-name", order.spec.name]
        words += ["--gpu-memory-utilization", f"{utilization(order):g}"]
        if not has_flag(own, "--tensor-parallel-size", "-tp"):
            words += ["--tensor-parallel-size", str(len(order.shares))]
        # Without it, vLLM 0.32 loads an embedding model like a model that writes text, and fails.
        makes_vectors = order.spec.model_type in ("embedding", "reranker")
        if makes_vectors and not has_flag(own, "--runner", "--task"):
            words += ["--runner", "pooling"]
        words += _own_flags(options, _OPTION_FLAGS, own)
        # The template is on the command line, since vLLM rejects a template in a request.
        chat = order.spec.options.get("chat_template")
        if chat and not has_flag(own, "--chat-template"):
            words += ["--chat-template", chat]
        words += ["--middleware", "gpu_console_key.Keyed"]
        paths = filter(None, (str(IN_VLLM), os.environ.get("PYTHONPATH")))
        environment = {"VLLM_API_KEY": order.key, "PYTHONPATH": os.pathsep.join(paths)}
        if self.sleeps(order.shares[0].device) and options.get("sleep", True):
            words += ["--enable-sleep-mode"]
            environment["VLLM_SERVER_DEV_MODE"] = "1"
        executable = shutil.which("vllm") or "vllm"
        return Command((executable, *words, *own), environment)


def _vllm_sleeps(send: SendRequest) -> bool | None:
    """Whether vLLM says that it sleeps; None if it does not say."""
    status, answer = send("GET", "/is_sleeping", None)
    return answer.get("is_sleeping") if status == 200 and isinstance(answer, dict) else None


# -- SGLang: the server `sglang.launch_server`, in this Python environment
#
# SGLang takes its key on the command line, which every user of the machine can read. So a line of Python adds it to the
# arguments within the process. `--mem-fraction-static` is a part of the memory that is free when SGLang starts. What it
# keeps for activations and CUDA graphs is beyond that.
#
# Without `--enable-weights-cpu-backup`, it loses its weights when it gives its memory back. It keeps this copy in host
# memory once it has slept. Its own health check computes a token, which would crash a server that sleeps.
#
# Sources: SGLang, docs, server arguments; srt/entrypoints/http_server.py; srt/utils/auth.py;
# srt/managers/scheduler_update_weights_mixin.py.

_WITH_KEY = (
    "import os, runpy, sys; sys.argv += ['--api-key', os.environ.pop('GPU_ENGINE_KEY')]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__')"
)
_SGLANG_FLAGS = {
    "context_length": "--context-length",
    "dtype": "--dtype",
    "revision": "--revision",
    "cache_dtype": "--kv-cache-dtype",
    "sequences": "--max-running-requests",
}


class Sglang(Recipe):
    """Starts SGLang's server."""

    LAYOUT = "balanced"  # tensor parallelism: equal parts
    SLEEPS_ON = "cuda"
    OWN_TEMPLATE = LISTS_FIELDS = CARDS_BY_NUMBER = True

    def missing(self) -> str:
        if importlib.util.find_spec("sglang"):
            return ""
        return "sglang is not installed in this environment.\n  Install it:  pip install sglang"

    def sleep(self, change: StateChange) -> str:
        return told(change.send, "/release_memory_occupation", {})

    def wake(self, change: StateChange) -> str:
        if why := told(change.send, "/resume_memory_occupation", {}):
            return why
        status, _ = change.send("GET", "/health_generate", None)  # computes a token
        return "" if status == 200 else f"it answered {status or 'nothing'} to GET /health_generate"

    def command(self, order: LaunchOrder) -> Command:
        """The command for `order`. A flag is left out if the user's own arguments set it."""
        own = user_arguments(order)
        options = {"context_length": order.config.get("context_at_load"), **order.spec.options}
        words = ["--model-path", order.source, "--host", "127.0.0.1", "--port", str(order.port)]
        words += ["--served-model-name", order.spec.name]
        words += ["--mem-fraction-static", f"{utilization(order):g}"]
        if not has_flag(own, "--tp-size", "--tensor-parallel-size", "--tp"):
            words += ["--tp-size", str(len(order.shares))]
        if order.spec.model_type in ("embedding", "reranker") and not has_flag(
            own, "--is-embedding"
        ):
            words += ["--is-embedding"]
        words += _own_flags(options, _SGLANG_FLAGS, own)
        if options.get("chat_template"):
            advice = "Write it to a file:  runtime_args=['--chat-template', 'FILE']"
            raise _refused(order, "SGLang reads a chat template from a file only", advice)
        if order.simulated and not has_flag(own, "--device"):
            words += ["--device", "cpu"]
        if self.sleeps(order.shares[0].device) and options.get("sleep", True):
            words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
        environment = {
            "GPU_ENGINE_KEY": order.key,
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        }
        return Command((sys.executable, "-P", "-c", _WITH_KEY, *words, *own), environment)


# -- Ollama: the server `ollama serve`; each model has its own, which keeps the model loaded
#
# Ollama decides how much of a model is put on the card. So the placement is read from `/api/ps`, and the server is
# restarted if a part of the model is not on the card. Nothing is downloaded, so the user must pull models first. Ollama
# has no key, so every user of this machine can send it requests.
#
# Sources: Ollama, docs/api, envconfig/config.go and openai/openai.go; Helix, Multi-GPU Scheduling, 5.3.

FOR_EVER = -1
# For other types, Ollama silently uses f16. Source: fs/ggml/ggml.go
_CACHE_TYPES = ("f16", "q8_0", "q4_0")
_TEXT_FIELDS = """model stream stream_options max_tokens seed stop temperature top_p frequency_penalty
    presence_penalty logprobs"""
_FIELDS = {
    "chat": frozenset(
        f"{_TEXT_FIELDS} messages response_format tools reasoning reasoning_effort top_logprobs".split()
    ),
    "completions": frozenset(f"{_TEXT_FIELDS} prompt suffix".split()),
    "embeddings": frozenset("model input dimensions encoding_format".split()),
}


class Ollama(Recipe):
    """Starts `ollama serve`."""

    LAYOUT = "proportional"
    KEYED = False

    def health_path(self, spec: ModelSpec) -> str:
        """A path at which the server answers once it runs. `prepare` then loads the model."""
        return "/api/version"

    def missing(self) -> str:
        if shutil.which("ollama"):
            return ""
        return "there is no command ollama here.\n  Install it from ollama.com"

    def model(self, order: LaunchOrder) -> str:
        return order.source

    def command(self, order: LaunchOrder) -> Command:
        """The command, with options as environment variables, except `gpu_layers` (see `prepare`).

        Raises BadSetting for a cache that Ollama has not.
        """
        options = order.spec.options
        environment = {
            "OLLAMA_HOST": f"127.0.0.1:{order.port}",
            "OLLAMA_MAX_LOADED_MODELS": "1",
            "OLLAMA_KEEP_ALIVE": str(FOR_EVER),
            "OLLAMA_NUM_PARALLEL": str(options.get("sequences") or 1),
        }
        if len(order.shares) > 1:
            environment["OLLAMA_SCHED_SPREAD"] = "1"
        if options.get("context_length"):
            environment["OLLAMA_CONTEXT_LENGTH"] = str(options["context_length"])
        if options.get("cache_dtype"):
            dtype = cache_type(order.spec)
            if dtype not in _CACHE_TYPES:
                expected = f"{', '.join(_CACHE_TYPES)} with Ollama"
                raise BadSetting("cache_dtype", options["cache_dtype"], expected)
            environment["OLLAMA_KV_CACHE_TYPE"] = dtype
            environment["OLLAMA_FLASH_ATTENTION"] = "1"
        return Command((shutil.which("ollama") or "ollama", "serve"), environment)

    def prepare(self, order: LaunchOrder, send: SendRequest) -> None:
        """Loads the model of `order` by a request without a prompt. Raises LoadFailed."""
        body: dict[str, Any] = {"model": order.source, "keep_alive": FOR_EVER, "stream": False}
        layers = order.spec.options.get("gpu_layers")
        if layers is not None and layers >= 0:
            body["options"] = {"num_gpu": layers}
        status, answer = send("POST", "/api/generate", body)
        if status == 200:
            return
        why = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = f"Ollama answered {status}: {why}."
        if status == 404:
            text = f"Ollama has no model {order.source}.\n  Pull it:  ollama pull {order.source}"
        raise LoadFailed(
            f"{order.spec.name} cannot be loaded: {text}",
            name=order.spec.name,
            source=order.source,
            mistake=status == 404,
        )

    def request_fields(self, order: LaunchOrder, send: SendRequest) -> RequestFields:
        """The fields that the code of Ollama's OpenAI API reads. It ignores any other field."""
        return _FIELDS

    def misplaced(self, order: LaunchOrder, send: SendRequest) -> str:
        """How much of the model is on the card, from the server; empty if all of it is there.

        Not checked on simulated cards, and for a model with a set number of `gpu_layers`.
        """
        layers = order.spec.options.get("gpu_layers")
        if order.simulated or (layers is not None and layers >= 0):
            return ""
        running = _running_model(order.source, send)
        if running is None:
            return "Ollama does not list it as loaded"
        total_bytes, card_bytes = running.get("size", 0), running.get("size_vram", 0)
        if card_bytes >= total_bytes:
            return ""
        return f"only {show_bytes(card_bytes)} of its {show_bytes(total_bytes)} are on the GPU"


def _running_model(name: str, send: SendRequest) -> dict[str, Any] | None:
    """The entry of the loaded model `name` in `/api/ps`. Ollama adds `:latest` if there is no tag."""
    tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
    status, answer = send("GET", "/api/ps", None)
    if status != 200 or not isinstance(answer, dict):
        return None
    for entry in answer.get("models", ()):
        if tagged in (entry.get("name"), entry.get("model")):
            return entry
    return None


# -- Hugging Face diffusers: our own server program (`diffusers_app.py`) serves one image pipeline
#
# Sources: diffusers, DiffusionPipeline.from_pretrained; OpenAI, images API; Model Boss, DiffusersBackend.

NEEDED = ("diffusers", "fastapi", "uvicorn")


class Diffusers(Recipe):
    """Starts our own server program."""

    INHERITS_SOCKET = True
    LAYOUT = "balanced"

    def evidence(self, spec: ModelSpec) -> Evidence:
        """The total size of the weight files of the pipeline, which has a directory for each part.

        Raises NotAModel for a path that is no pipeline.
        """
        path = Path(spec.source).expanduser()
        if (path / "model_index.json").is_file():
            size = sum(file.stat().st_size for file in path.glob("*/*.safetensors"))
            return Evidence(file_bytes=size, file_format="safetensors", at_load=True)
        if path.exists():
            text = f"{spec.name}: {path} is not a pipeline; it has no model_index.json."
            raise NotAModel(text, name=spec.name, source=spec.source)
        why = f"there is no {path.absolute()}"
        return Evidence(name=spec.source, why_unknown=why, at_load=True)

    def missing(self) -> str:
        absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if not absent:
            return ""
        verb = "is" if len(absent) == 1 else "are"
        return (
            f"{', '.join(absent)} {verb} not installed.\n"
            f"  Install it:  pip install 'gpu-console[diffusion,serve]'"
        )

    def command(self, order: LaunchOrder) -> Command:
        words = ["--model", order.source, "--name", order.spec.name]
        words += ["--socket", str(order.socket_fd)]
        words += ["--device", "cpu" if order.simulated else "cuda"]
        words += ["--dtype", order.spec.options.get("dtype", "auto")]
        for option in ("trust_remote_code", "allow_missing"):
            if order.spec.options.get(option):
                words += [f"--{option.replace('_', '-')}"]
        if len(order.shares) > 1 and not order.simulated:
            words += ["--balanced"]
        program = python_file(Path(__file__).with_name("diffusers_app.py"))
        return Command((*program, *words), {"GPU_ENGINE_KEY": order.key})


# -- any other program: the model's fields have its command line, and how it sleeps and wakes

NOT_STARTED = (126, 127)  # exit statuses of a command that could not be started
LOOK_SECONDS = 0.05


class Program(Recipe):
    """Starts the command of the model."""

    LAYOUT = "single"
    SLEEPS_ON = ""  # on each card: the model's own fields decide it (`ModelSpec.may_sleep`)
    MEASURED_ASLEEP = True

    def missing(self) -> str:
        return ""

    def health_path(self, spec: ModelSpec) -> str:
        return str(spec.options.get("health", "/health"))

    def command(self, order: LaunchOrder) -> Command:
        words = (*filled(order, order.spec.options["command"]), *user_arguments(order))
        return Command(words, {"GPU_ENGINE_KEY": order.key})

    def sleep(self, change: StateChange) -> str:
        return _told_program(change, "sleep") or _until_asleep(change, True)

    def wake(self, change: StateChange) -> str:
        if why := _told_program(change, "wake") or _until_asleep(change, False):
            return why
        path = self.health_path(change.order.spec)
        while (status := change.send("GET", path, None)[0]) != 200:
            if time.monotonic() >= change.until:
                return f"it answered {status or 'nothing'} to GET {path}"
            time.sleep(LOOK_SECONDS)
        return ""


def _told_program(change: StateChange, verb: str) -> str:
    """Tells a program to sleep or to wake. Returns why it was not told; empty if it was."""
    how = change.order.spec.options[verb]
    if isinstance(how, str):
        return told(change.send, how)
    status = change.run(filled(change.order, how))
    if status is None:
        return f"its command {how[0]} did not end in time"
    return f"its command {how[0]} ended with code {status}" if status else ""


def _until_asleep(change: StateChange, asleep: bool) -> str:
    """Waits until a program says that it is `asleep`, or that it is not. Returns why it does not say so.

    A program without such a field is taken at its word.
    """
    how = change.order.spec.options.get("asleep")
    while how is not None:
        says = _says_asleep(change, how)
        if isinstance(says, str):
            return says
        if says == asleep:
            break
        if time.monotonic() >= change.until:
            return f"it says that it {'does not sleep' if asleep else 'still sleeps'}"
        time.sleep(LOOK_SECONDS)
    return ""


def _says_asleep(change: StateChange, how: str | list[str]) -> bool | str:
    """Whether a program says that it sleeps; a text, if that cannot be told from its answer."""
    if not isinstance(how, str):
        status = change.run(filled(change.order, how))
        if status is None or status < 0 or status in NOT_STARTED:
            return f"its command {how[0]} {'did not end in time' if status is None else 'failed'}"
        return status == 0
    status, answer = change.send("GET", how, None)
    values = list(answer.values()) if isinstance(answer, dict) else [answer]
    truths = [value for value in values if isinstance(value, bool)]
    if status == 200 and len(truths) == 1:
        return truths[0]
    return f"it answered {status or 'nothing'} to GET {how}, and not true or false: {answer}"[:300]
