"""A whole step of DistributedDataParallel in a CUDA graph: what replays gives the gradients of a step that runs."""

import pytest
import torch

import gradwire

from .test_ddp_cuda import WIDTH, Net
from .test_engine_cuda import nccl, needs_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), needs_nccl]
WARM_UP = 5  # steps; buckets are made anew after the first


def backward(model, inputs):
    model.zero_grad(set_to_none=True)
    model(inputs, 0).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def captured(rank, world_size, spec):
    """The gradients that a graph gives for inputs that it was not captured with, and those of a step for the same."""
    torch.cuda.set_device(0)
    inputs = torch.randn(8, WIDTH, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = gradwire.DistributedDataParallel(
            Net().cuda(), process_group=nccl(rank), compressor=spec, bucket_cap_mb=0.005
        )
        for _ in range(WARM_UP):
            backward(model, inputs)
    torch.cuda.synchronize()
    mode = "thread_local"  # NCCL has a thread that asks for events
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        static = backward(model, inputs)
    inputs.copy_(torch.randn(8, WIDTH, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [gradient.cpu() for gradient in static]
    with torch.cuda.stream(stream):
        ran = [gradient.cpu() for gradient in backward(model, inputs)]
    model.compression.close()
    return replayed, ran


WITHOUT_FEEDBACK = [f"{name}:ratio=0.2,error_feedback=false" for name in ("topk", "chunktopk")]


@pytest.mark.parametrize("spec", ["none", "bf16", "fp16", *WITHOUT_FEEDBACK])
def test_a_step_without_state_can_be_captured(ranks, spec):
    ((replayed, ran),) = ranks.run(captured, 1, spec, timeout=200)
    assert any(gradient.any() for gradient in replayed)
    for ours, expected in zip(replayed, ran, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
