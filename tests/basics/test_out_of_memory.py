import errno

import pytest
import torch

from basics.out_of_memory import is_out_of_gpu_memory, is_out_of_memory, says_out_of_memory

NOT_STARTED = "CUBLAS_STATUS_NOT_INITIALIZED when calling `{}(handle)`"


@pytest.mark.parametrize("text", [
    "CUDA error: out of memory", "Triton Error [CUDA]: out of memory",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUDA error: " + NOT_STARTED.format("cublasCreate"),
    "RuntimeError: CUDNN_STATUS_ALLOC_FAILED", "CUDA error: cudaErrorMemoryAllocation",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED", "ncclSystemError: Failed to CUDA calloc async",
])
def test_texts_of_a_gpu(text):
    assert says_out_of_memory(text)
    assert is_out_of_memory(RuntimeError(text)) and is_out_of_gpu_memory(RuntimeError(text))


@pytest.mark.parametrize("text", [
    "CUDA error: " + NOT_STARTED.format("cublasGemmEx"),
    "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block"
    " sizes or `num_stages` may help.",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm, Required: 262144",
    "CUDA error: an illegal memory access was encountered", "a path named /memory/out",
])
def test_texts_of_other_errors(text):
    assert not says_out_of_memory(text) and not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("error", [
    MemoryError(), MemoryError("out of memory"), OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    RuntimeError("std::bad_alloc")], ids=repr)
def test_the_machines_memory_is_not_the_gpus(error):
    assert is_out_of_memory(error) and not is_out_of_gpu_memory(error)


def test_what_led_to_an_error_counts_unless_it_is_suppressed():
    for how, counts in (("from", True), ("handling", True), ("from none", False)):
        first, error = torch.OutOfMemoryError("no text that names it"), RuntimeError("second")
        error.__context__ = first
        error.__cause__ = first if how == "from" else None
        error.__suppress_context__ = how != "handling"
        assert is_out_of_memory(error) is is_out_of_gpu_memory(error) is counts, how


@pytest.mark.gpu
def test_the_drivers_text_is_recognised():
    torch.cuda.init()
    with pytest.raises(RuntimeError) as of_code:
        torch.cuda.check_error(2)  # cudaErrorMemoryAllocation
    with pytest.raises(torch.AcceleratorError) as of_call:
        torch.empty(2**50, dtype=torch.uint8, pin_memory=True)  # a petabyte
    for caught in (of_code, of_call):
        assert says_out_of_memory(str(caught.value)) and is_out_of_memory(caught.value), caught
    assert torch.ones(2, device="cuda").sum().item() == 2  # the context still works
