"""Steady steps reserve no more of a GPU's memory: buckets use the same blocks again."""

import pytest
import torch
from torch import nn

from .test_engine_cuda import nccl, needs_nccl
from .test_training_cuda import ddp_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WIDTH, LAYERS = 512, 16  # 17 MB, in buckets of two layers
WARM, STEPS = 20, 200
SEGMENT = 20 << 20  # bytes that torch reserves at once: more buckets than before may be on their way in one step
SPECS = ["bf16", "topk", "int4:residual_bits=8"]


def reserved(rank, group, spec, own):
    """Bytes that the allocator has reserved after the first steps, and after many more."""
    torch.cuda.set_device(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 2, "process_group": group}
    model, handle = ddp_of(model, spec, own, **options)
    found = []
    for step in range(STEPS):
        model(torch.full((4, WIDTH), step + rank + 1.0, device="cuda")).square().mean().backward()
        model.zero_grad()
        if step + 1 in (WARM, STEPS):
            torch.cuda.synchronize()
            found.append(torch.cuda.memory_reserved())
    handle.close()
    return found


def with_gloo(rank, world_size, spec, own):
    return reserved(rank, torch.distributed.group.WORLD, spec, own)


def with_nccl(rank, world_size, spec, own):
    return reserved(rank, nccl(rank), spec, own)


@pytest.mark.parametrize(
    ("run", "world_size"), [(with_gloo, 2), pytest.param(with_nccl, 1, marks=needs_nccl)], ids=["gloo", "nccl"]
)
@pytest.mark.parametrize("own", [False, True], ids=["torch", "own"])
@pytest.mark.parametrize("spec", SPECS)
def test_steady_steps_reserve_no_more_memory(ranks, run, world_size, spec, own):
    for before, after in ranks.run(run, world_size, spec, own, timeout=200):
        assert after <= before + SEGMENT
