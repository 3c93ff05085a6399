"""What an engine's or a driver's words mean: out of memory, a driver that was reset, a context that is lost.

Pure: text in, `Fault` out. Nobody gives these errors a class of their own: torch raises RuntimeError for most,
llama.cpp prints a line and aborts, servers answer 500. So they are known by their texts.

Sources: Kitchen Brigade, GPU Allocation Semantics, sections 3 and 6; NVIDIA, CUDA Runtime API, cudaError_t; cuBLAS,
cublasStatus_t; llama.cpp, ggml-cuda.cu, ggml-metal.m and llama-context.cpp; PyTorch, c10/cuda/CUDAException.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

MOST_DECODE_FAILURES = 3  # in a row; then the model is loaded anew


class Kind(enum.StrEnum):
    """What went wrong, and so what helps."""

    OUT_OF_MEMORY = "out of memory"  # room helps
    DRIVER_RESET = "driver reset"  # the driver let the device go; a fresh process finds it again
    STICKY = "sticky CUDA error"  # every later call into this process's context fails the same way
    ASSERT = "device-side assert"  # as sticky; a kernel found an index or a label out of range
    DECODE = "decode failure"  # llama.cpp could not compute a batch; may pass, may be for good
    CRASH = "crash"  # the process ended, and nothing it said tells why


class Fault(NamedTuple):
    """A text that was recognised."""

    kind: Kind
    line: str  # the one that tells

    @property
    def loses_context(self) -> bool:
        """Whether the process that it struck can use the device no more, whatever it does."""
        return self.kind in (Kind.STICKY, Kind.ASSERT)

    @property
    def clears_model(self) -> bool:
        """Whether the model must be put away and loaded anew."""
        return self.loses_context or self.kind is Kind.DRIVER_RESET


# The first that is found counts: a lost context is told before what failed because of it.
_TEXTS: tuple[tuple[Kind, str], ...] = (
    (Kind.ASSERT, r"device-side assert|cudaErrorAssert\b|CUDA_ERROR_ASSERT\b"),
    (
        Kind.STICKY,
        r"illegal memory access|cudaErrorIllegalAddress|misaligned address|illegal instruction was encountered|"
        r"unspecified launch failure|hardware stack error|invalid program counter|"
        r"operation not supported on global/shared address space|context is destroyed|"
        r"CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED|CUDA error: invalid device context",
    ),
    (
        Kind.DRIVER_RESET,
        r"Metal initialization failed|ggml_metal_\w*init\w*: error|Metal .*shader.* compil\w* failed|"
        r"failed to (?:create|initialize) (?:the )?Metal|"
        r"cuBLAS initialization failed|CUBLAS_STATUS_NOT_INITIALIZED|"
        r"launch timed out and was terminated|cudaErrorLaunchTimeout|driver shutting down|"
        r"GPU has fallen off the bus|GPU is lost|NVRM: Xid|device (?:is )?lost|ErrorDeviceLost|"
        r"(?:uncorrectable|double[- ]bit) ECC error|system not yet initialized|"
        r"CUDA error: (?:initialization error|no CUDA-capable device|unknown error)|"
        r"CUDA-capable device\(s\) is/are busy or unavailable|driver (?:was )?reset|"
        r"CUDA driver (?:crash|error: unknown)|GPU (?:hang|reset)",
    ),
    (
        Kind.OUT_OF_MEMORY,
        r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|"
        r"(?:failed|unable) to allocate .*(?:buffer|KV cache)|cudaErrorMemoryAllocation|"
        r"ErrorOutOfDeviceMemory|insufficient memory|No available memory for the cache blocks|"
        r"Free memory on device .* is less than desired",
    ),
    (
        Kind.DECODE,
        r"llama_(?:decode|encode)\W* *(?:returned|failed)|llama_decode: failed to decode|failed to decode",
    ),
)
_KNOWN = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _TEXTS)


def recognise(text: str) -> Fault | None:
    """The fault that a text tells of, an error's words or the end of a log; None: it tells of none.

    >>> recognise("RuntimeError: CUDA error: device-side assert triggered")
    Fault(kind=<Kind.ASSERT: 'device-side assert'>, line='RuntimeError: CUDA error: device-side assert triggered')
    >>> recognise("ValueError: Requested tokens (900) exceed context window of 512") is None
    True
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for kind, pattern in _KNOWN:
        for line in lines:
            if pattern.search(line):
                return Fault(kind, line[:300])
    return None


def decode_failures(before: int, fault: Fault | None) -> int:
    """How many decode failures in a row that makes.

    >>> decode_failures(2, Fault(Kind.DECODE, "")), decode_failures(2, None)
    (3, 0)
    """
    return before + 1 if fault is not None and fault.kind is Kind.DECODE else 0
