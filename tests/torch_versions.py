"""Tests that take more of torch than the oldest one that gradwire runs with has."""

import pytest
import torch


def needs_torch(version, why):
    """Skips on an older torch; `version` is one that has been seen to have it."""
    return pytest.mark.skipif(torch.__version__ < version, reason=f"torch {torch.__version__}: {why}")


complex_numbers = needs_torch("2.15", "Gloo does not broadcast complex numbers")
copied_in_cpp = needs_torch("2.10", "gradients are copied by torch's operators")
backends_in_python = needs_torch("2.14", "it cannot have backends in Python")
buffers_by_argument = needs_torch("2.15", "its class has no forward_sync_buffers and no bucket_cap_mb_list")
quantization_hooks = needs_torch("2.15", "its quantization hooks fail on a CPU")
fake_devices = needs_torch("2.15", "its fake tensors ask the CUDA driver")
fsdp_of_others = needs_torch("2.9", "its FSDP2 takes communication of nobody else")
fsdp_sums = needs_torch("2.10", "its FSDP2 has Gloo divide, which Gloo cannot")
replicate_of_fsdp = needs_torch("2.10", "its replicate() is FSDP2 on a mesh of two dimensions, where there is one")
fsdp_of_integers = needs_torch("2.15", "its FSDP2 takes no integers")
compiled_backward_of_fsdp = needs_torch("2.15", "it fails by itself where a backward of FSDP2 is compiled")
operations_in_cpp = needs_torch("2.15", "operators do not show how they reduce, so calls from C++ stay uncompressed")
muon_of_shards = needs_torch("2.15", "the bytes of its Muon on shards were not counted")
