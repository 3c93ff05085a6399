"""llama.cpp: its own server, `llama-server`, or else the server of llama-cpp-python.

If the command `llama-server` is missing, `python -m llama_cpp.server` starts the server of
llama-cpp-python.

Sources: llama.cpp, tools/server: README, server-schema.cpp, server-chat.cpp (as in llama-cpp-python
0.3.36); llama-cpp-python, server/settings.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from typing import Any

from ...errors import LoadFailed
from ...facts import Evidence, ModelSpec
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
from .recipe import (
    Command,
    LaunchOrder,
    Recipe,
    RequestFields,
    SendRequest,
    custom_template,
    fields_in_openapi,
    has_flag,
    user_arguments,
)

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

    def health_path(self) -> str:
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
    chat = custom_template(spec)
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
    if custom_template(order.spec):
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


RECIPE = LlamaServer()
