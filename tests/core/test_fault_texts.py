"""Faults of drivers and engines that can be recognised only by their text. Other errors are not taken for faults."""

import pytest

from gpu_runtime.fault_texts import Kind, recognise

KNOWN = {
    Kind.ASSERT: [
        "RuntimeError: CUDA error: device-side assert triggered",
        "torch.AcceleratorError: CUDA error: device-side assert triggered\n"
        "CUDA kernel errors might be asynchronously reported",
        "cudaErrorAssert",
    ],
    Kind.STICKY: [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "CUDA error: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: an illegal instruction was encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    ],
    Kind.DRIVER_RESET: [
        "RuntimeError: Metal initialization failed",
        "RuntimeError: cuBLAS initialization failed",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "CUDA error: the launch timed out and was terminated",
        "Unable to determine the device handle: GPU is lost",
        "NVRM: Xid (PCI:0000:65:00): 79, pid=4121, GPU has fallen off the bus.",
        "vk::DeviceLostError: vk::Queue::submit: ErrorDeviceLost",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: all CUDA-capable devices are busy or unavailable\n"
        "CUDA-capable device(s) is/are busy or unavailable",
    ],
    Kind.OUT_OF_MEMORY: [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "CUDA out of memory",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4096.00 MiB on device 0: "
        "cudaMalloc failed: out of memory",
        "llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        "ValueError: Free memory on device cuda:0 (4.2/24.0 GiB) on startup is "
        "less than desired GPU memory utilization",
    ],
    Kind.DECODE: [
        "RuntimeError: llama_decode returned -3",
        "llama_decode: failed to decode, ret = -1",
    ],
}


@pytest.mark.parametrize(
    ("kind", "text"), [(kind, text) for kind, texts in KNOWN.items() for text in texts]
)
def test_each_fault_is_recognised_by_its_text(kind, text):
    """The texts are quoted from the documents and from the libraries' sources."""
    fault = recognise(text)
    assert fault is not None and fault.kind is kind and fault.line in text


@pytest.mark.parametrize("text", [
    "", "ValueError: Requested tokens (900) exceed context window of 512", "KeyError: 'messages'",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "main: server is listening", "AssertionError: the device must be set",
    "RuntimeError: CUDA error: invalid configuration argument",
])  # fmt: skip
def test_other_errors_are_no_fault(text):
    """The texts are those of wrong calls, which the caller must correct. A reload of the model would not help."""
    assert recognise(text) is None


def test_a_lost_context_is_reported_before_its_consequences():
    """After a device-side assert every call fails, also an allocation. The assert is reported, not
    the failed allocation, since more free memory would not help.
    """
    log = (
        "CUDA error: out of memory\n  in ggml_cuda_pool\nCUDA error: device-side assert triggered\n"
    )
    fault = recognise(log)
    assert fault.kind is Kind.ASSERT and fault.line == "CUDA error: device-side assert triggered"


@pytest.mark.parametrize(("kind", "clears", "loses"), [
    (Kind.OUT_OF_MEMORY, False, False), (Kind.DECODE, False, False),
    (Kind.DRIVER_RESET, True, False), (Kind.STICKY, True, True), (Kind.ASSERT, True, True),
])  # fmt: skip
def test_the_remedy_of_each_fault(kind, clears, loses):
    """Each fault has a remedy: free memory, a retry, a reload of the model, or a new process."""
    fault = recognise(KNOWN[kind][0])
    assert (fault.clears_model, fault.loses_context) == (clears, loses)
