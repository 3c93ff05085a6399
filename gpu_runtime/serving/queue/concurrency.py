"""How many calls a model runs at once, by its backend and its option `sequences`."""

from __future__ import annotations

import functools
import os
import shutil

from ...facts import ModelSpec

# The number of calls at once if the model's `sequences` is not set. For all other backends it is 1.
CONCURRENCY = {"vllm": 256, "fake": 256}
# These backends run one call at a time, and do not read `sequences`. llama-cpp-python computes one sequence after
# another. Transformers does not batch two `generate` calls. If they ran at once, each would change the random numbers
# that the other one gets from its seed.
SEQUENTIAL_BACKENDS = ("llama_cpp", "transformers")
NATIVE_LLAMA_SERVER = "llama-server"  # the name of the backend, and of its command


def calls_at_once(spec: ModelSpec) -> int:
    """The number of calls that the model of `spec` runs at once.

    If the command `llama-server` is missing, llama-cpp-python's server runs the models of the backend `llama-server`,
    one call at a time.
    """
    if spec.backend in SEQUENTIAL_BACKENDS:
        return 1
    if spec.backend == NATIVE_LLAMA_SERVER and not _native_server(os.environ.get("PATH", "")):
        return 1
    return int(spec.options.get("sequences") or CONCURRENCY.get(spec.backend, 1))


@functools.lru_cache(maxsize=8)
def _native_server(path: str) -> bool:
    return shutil.which(NATIVE_LLAMA_SERVER, path=path) is not None
