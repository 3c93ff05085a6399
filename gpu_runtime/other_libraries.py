"""What other libraries of this process hold on its cards.

A library that is merely imported holds nothing. Each library is asked, and no library is imported or initialized by the
question. What a library holds cannot be moved, and it may have stored the addresses of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .threads import imported
from .tracked_objects import instances, subclasses
from .units import show_bytes


class Held(NamedTuple):
    """What one library holds on one device."""

    library: str
    what: str  # such as `3 arrays`
    device: str  # such as cuda:0; empty if the library does not say
    bytes: int = 0  # 0 if the library does not say

    def __str__(self) -> str:
        size = f" ({show_bytes(self.bytes)})" if self.bytes else ""
        return (
            f"{self.library} holds {self.what}{size}{f' on {self.device}' if self.device else ''}"
        )


# Classes whose objects refer to memory of a card, or to the addresses of tensors: library, module, class.
CLASSES = (
    ("cupy", "cupy", "ndarray"),
    ("numba.cuda", "numba.cuda.cudadrv.devicearray", "DeviceNDArrayBase"),
    ("cudf", "cudf.core.buffer.buffer", "Buffer"),
    ("warp", "warp", "array"),
    ("vllm", "vllm.v1.engine.llm_engine", "LLMEngine"),
    ("vllm", "vllm.v1.engine.async_llm", "AsyncLLM"),
    ("deepspeed", "deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("transformer_engine", "transformer_engine.pytorch.module.base", "TransformerEngineBaseModule"),
    ("dgl", "dgl.heterograph", "DGLGraph"),
    ("onnxruntime", "onnxruntime.capi.onnxruntime_inference_collection", "IOBinding"),
    ("onnxruntime", "onnxruntime.capi.onnxruntime_inference_collection", "OrtValue"),
    ("openvino", "openvino._ov_api", "InferRequest"),
    ("openvino", "openvino._ov_api", "AsyncInferQueue"),
)
# The objects of these libraries are not listed by the garbage collector, and they cannot be asked.
UNKNOWN = ("rmm", "pycuda.driver", "tensorrt")


def held() -> list[Held]:
    """What each library holds now."""
    found = [*_objects()]
    for library, asks in (("jax", _jax), ("tensorflow", _tensorflow)):
        try:
            found += asks()
        except Exception as error:  # another version: unknown is not nothing
            found.append(Held(library, f"what it does not say ({type(error).__name__})", ""))
    found += [Held(name, "what it does not say", "") for name in UNKNOWN if imported(name)]
    return found


def _objects() -> Iterator[Held]:
    kinds = {}
    for library, module, name in CLASSES:
        kind = getattr(imported(module), name, None)
        if isinstance(kind, type):
            kinds |= dict.fromkeys(subclasses(kind), library)
    count: dict[tuple[str, str], int] = {}
    for instance in instances(kinds) if kinds else ():
        key = kinds[type(instance)], type(instance).__name__
        count[key] = count.get(key, 0) + 1
    for (library, name), number in count.items():
        yield Held(library, f"{number} objects of {name}", "")
    pool = (
        _called(imported("cupy"), "get_default_memory_pool") if "cupy" in kinds.values() else None
    )
    if pool is not None and any(library == "cupy" for library, _ in count):
        yield Held("cupy", "a memory pool", "cuda:0", pool.total_bytes())


def _called(owner: Any, name: str) -> Any:
    function: Callable[[], Any] | None = getattr(owner, name, None)
    return function() if function is not None else None


def _jax() -> Iterator[Held]:
    """The arrays and the pool of each card of jax. Until the first array, jax has opened no card."""
    bridge = imported("jax._src.xla_bridge")
    for client in list(bridge._backends.values()) if bridge is not None else ():
        if client.platform == "cpu":
            continue
        arrays = len(client.live_arrays())
        for device in client.local_devices():
            stats = device.memory_stats() or {}
            size = stats.get("pool_bytes") or stats.get("bytes_in_use") or 0
            if arrays or size:
                yield Held("jax", f"{arrays} arrays", f"cuda:{device.local_hardware_id}", size)


def _tensorflow() -> Iterator[Held]:
    """The pool of each card of TensorFlow. Until the first operation, TensorFlow has opened no card."""
    context = _called(imported("tensorflow.python.eager.context"), "context_safe")
    if context is None or not context._initialized:
        return
    for number, name in enumerate(device for device in context.list_logical_devices("GPU")):
        size = context.get_memory_info(name.name.removeprefix("/device:"))["current"]
        yield Held("tensorflow", "a memory pool", f"cuda:{number}", size)
