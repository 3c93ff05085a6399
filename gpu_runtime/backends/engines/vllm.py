"""vLLM: the server `vllm serve`.

When vLLM starts, it takes a fixed part of each card. It keeps this part even if the model needs
less.

Source: vLLM, CLI reference, `vllm serve`.
"""

from __future__ import annotations

import shutil

from ..formats import sources
from .recipe import (
    Command,
    LaunchOrder,
    Recipe,
    RequestFields,
    SendRequest,
    custom_template,
    dtype_option,
    fields_in_openapi,
    has_flag,
    user_arguments,
    utilization,
)

_OPTION_FLAGS = {
    "context_length": "--max-model-len",
    "dtype": "--dtype",
    "revision": "--revision",
    "cache_dtype": "--kv-cache-dtype",
}


class Vllm(Recipe):
    """Starts `vllm serve`."""

    LAYOUT = "balanced"  # tensor parallelism: equal parts

    def missing(self) -> str:
        if shutil.which("vllm"):
            return ""
        return "there is no command vllm here.\n  Install it:  pip install vllm"

    def command(self, order: LaunchOrder) -> Command:
        """The command for `order`. A flag is left out if the user's own arguments set it."""
        own = user_arguments(order)
        options = {"context_length": order.config.get("context_at_load"), **order.spec.options}
        options["dtype"] = dtype_option(order.spec)
        words = ["serve", order.source, "--host", "127.0.0.1", "--port", str(order.port)]
        words += ["--served-model-name", order.spec.name]
        words += ["--gpu-memory-utilization", f"{utilization(order):g}"]
        if not has_flag(own, "--tensor-parallel-size", "-tp"):
            words += ["--tensor-parallel-size", str(len(order.shares))]
        # Without it, vLLM 0.32 loads an embedding model like a model that writes text, and fails.
        makes_vectors = order.spec.model_type in ("embedding", "reranker")
        if makes_vectors and not has_flag(own, "--runner", "--task"):
            words += ["--runner", "pooling"]
        for option, flag in _OPTION_FLAGS.items():
            if options.get(option) is not None and not has_flag(own, flag):
                words += [flag, str(options[option])]
        # The template is on the command line, since vLLM rejects a template in a request.
        chat = custom_template(order.spec)
        if chat and not has_flag(own, "--chat-template"):
            words += ["--chat-template", chat]
        if options.get("trust_remote_code") and not has_flag(own, "--trust-remote-code"):
            words += ["--trust-remote-code"]
        executable = shutil.which("vllm") or "vllm"
        return Command((executable, *words, *own), {"VLLM_API_KEY": order.key})

    def template(self, order: LaunchOrder) -> str | None:
        return sources.template(order.source, order.spec.name)

    def request_fields(self, order: LaunchOrder, send: SendRequest) -> RequestFields:
        """The fields in vLLM's own OpenAPI document. vLLM only logs a field that it does not know."""
        return fields_in_openapi(send)


RECIPE = Vllm()
