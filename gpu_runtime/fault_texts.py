"""Recognises faults, such as out of memory or a driver reset, by the text of an error or a log.

Pure: no clock, device, file or log is read. Most of these faults have no error class of their own.
torch raises RuntimeError for them, llama.cpp prints a line and aborts, and servers answer 500. So
the faults are recognised by their texts.

Sources: Kitchen Brigade, GPU Allocation Semantics, sections 3 and 6; NVIDIA, CUDA Runtime API,
cudaError_t; cuBLAS, cublasStatus_t; llama.cpp, ggml-cuda.cu, ggml-metal.m and llama-context.cpp;
PyTorch, c10/cuda/CUDAException.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .compat import StrEnum

LONGEST_LINE = 300  # characters of a line that an error message quotes
MOST_DECODE_FAILURES = 3  # in a row; then the model is loaded again
WRITE_REFUSED = (
    "Cannot access data pointer of Tensor"  # so torch's error for a write begins; see swap.py
)


class Kind(StrEnum):
    """The kinds of fault. The kind decides the remedy."""

    OUT_OF_MEMORY = "out of memory"  # remedy: free memory
    DRIVER_RESET = "driver reset"  # the driver released the device; a new process finds it again
    # Every later call in this process's CUDA context fails the same way.
    STICKY = "sticky CUDA error"
    ASSERT = "device-side assert"  # sticky too; a kernel found an index or a label out of range
    DECODE = "decode failure"  # llama.cpp could not compute a batch; transient or permanent
    CRASH = "crash"  # the process ended, and its output does not show why


class Fault(NamedTuple):
    """A recognised fault."""

    kind: Kind
    line: str  # the line of the text that shows the fault, at most 300 characters

    @property
    def loses_context(self) -> bool:
        """Whether the affected process can no longer use the device at all."""
        return self.kind in (Kind.STICKY, Kind.ASSERT)

    @property
    def clears_model(self) -> bool:
        """Whether the model must be unloaded and loaded again."""
        return self.loses_context or self.kind is Kind.DRIVER_RESET


# If a text fits several kinds, the first kind in this list counts. The kinds that lose the context
# come first, because a lost context causes errors of the other kinds.
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


def recognise(text: str) -> Fault | None:
    """The fault that `text` (an error message or the end of a log) shows.

    The result is None if `text` shows no fault.

    >>> fault = recognise("RuntimeError: CUDA error: device-side assert triggered")
    >>> fault.kind, fault.line
    (<Kind.ASSERT: 'device-side assert'>, 'RuntimeError: CUDA error: device-side assert triggered')
    >>> recognise("ValueError: Requested tokens (900) exceed context window of 512") is None
    True
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for kind, pattern in _TEXTS:
        for line in lines:
            if re.search(pattern, line, re.IGNORECASE):  # `re` keeps it compiled: 3 ms at the first
                return Fault(kind, line[:LONGEST_LINE])
    return None


def decode_failures(before: int, fault: Fault | None) -> int:
    """The number of decode failures in a row after one more call.

    `before` is the number before that call. `fault` is the fault of the call, or None. Any result
    other than a decode failure sets the number back to 0.

    >>> decode_failures(2, Fault(Kind.DECODE, "")), decode_failures(2, None)
    (3, 0)
    """
    is_decode = fault is not None and fault.kind is Kind.DECODE
    return before + 1 if is_decode else 0


_LINK = "For further information visit https://errors.pydantic.dev/"
# Lines of gdb, which llama.cpp calls when it aborts, and the line before them that says why.
_OF_GDB = re.compile(
    r"\[(?:New LWP|Thread debugging|Inferior|Switching)|Using host libthread_db|#\d+ |0x[0-9a-f]+ in |"
    r"\d+\t|warning: |This GDB|Enable debuginfod|Debuginfod|Downloading |Could not attach|ptrace: |"
    r"No stack|The program is not being run|Missing separate debuginfo|Reading symbols|"
    r"Attaching to|\(No debugging symbols|\[Current thread|\[detaching|\[Detaching"
)
_ABORT = re.compile(
    r"GGML_ASSERT|GGML_ABORT|terminate called|what\(\):|Assertion .* failed", re.IGNORECASE
)
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception): .+")


def last_line(text: str) -> str:
    """The last line of `text` that is not blank, at most 300 characters; empty if there is none.

    A link of pydantic's is not counted, nor what gdb prints about a crash. If the text has the line of
    an abort, it counts. If the last line only refers to an earlier one, as vLLM's does,
    the result is the first exception.

    >>> last_line("loading\\nno such file\\n\\n")
    'no such file'
    >>> last_line("(Worker) ValueError: no tokenizer\\nRuntimeError: failed. See root cause above.")
    'ValueError: no tokenizer'
    >>> last_line("ggml.c:99: GGML_ASSERT(n > 0) failed\\n#0 0x7 in wait4 ()\\n[Inferior 1 (process 7) detached]")
    'ggml.c:99: GGML_ASSERT(n > 0) failed'
    >>> last_line(f"Value error, 512 is more than 256\\n{_LINK}2.14/v/value_error")
    'Value error, 512 is more than 256'
    """
    lines = [line.strip() for line in text.splitlines()]
    said = [
        line for line in lines if line and not line.startswith(_LINK) and not _OF_GDB.match(line)
    ]
    aborts = [line for line in said if _ABORT.search(line)]
    if aborts:
        return aborts[-1][:LONGEST_LINE]
    last = said[-1] if said else ""
    if "cause above" in last and (found := _EXCEPTION.search(text)):
        last = found[0]
    return last[:LONGEST_LINE]
