"""What real ranks compute, against torch's own hooks and algorithms written by hand."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import gradwire

from .given import average, gradients, wrapped

SHAPES = ((16, 20), (9,), (12, 30), (4, 4), (16, 20))
STEPS = 5


def away_from_zero(rank, step):
    """Gradients that float16 holds as normal numbers, halved too: there a division by 2 and a rounding commute."""
    return [gradient + gradient.sign() / 64 for gradient in gradients(rank, step, SHAPES)]


def run_half(rank, world_size, spec, hook):
    torch_s_own, ours = wrapped(SHAPES, bucket_cap_mb=0.001), wrapped(SHAPES, bucket_cap_mb=0.001)
    torch_s_own.register_comm_hook(None, hook)
    handle = gradwire.attach(ours, spec)
    pairs = [[average(ddp, away_from_zero(rank, step)) for ddp in (ours, torch_s_own)] for step in range(3)]
    handle.close()
    return pairs


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_half_precision_equals_torch_s_hooks_in_every_bit_on_two_ranks(ranks, spec, world_size):
    hook = getattr(default_hooks, f"{spec}_compress_hook")
    rounding = torch.finfo({"fp16": torch.float16, "bf16": torch.bfloat16}[spec]).eps
    for pairs in ranks.run(run_half, world_size, spec, hook):
        for ours, expected in pairs:
            for name in expected:
                tolerance = 0 if world_size == 2 else 8 * rounding
                torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=tolerance)


def warmed_up(rank, register):
    """A model in float64 after two dense steps, by when DDP has its final buckets; and what `register` returned."""
    ddp = wrapped(SHAPES, torch.float64, find_unused_parameters=False)  # its bitmap collides with torch's PowerSGD
    registered = register(ddp)
    for step in range(2):
        average(ddp, gradients(rank, step, SHAPES, torch.float64))
    return ddp, registered


def fields(handle, suffix):
    """{parameter: tensor} of the state's field of this name."""
    saved = handle.state_dict()["parameters"]
    found = {name: [t for key, t in entry.items() if key.split(".")[-1] == suffix] for name, entry in saved.items()}
    return {name: tensors[0].T if suffix == "q" else tensors[0] for name, tensors in found.items() if tensors}


def begin_at(state, factors, order):
    """Give torch's hook factors Q to begin at, instead of random ones; `order`: the parameters in its only bucket."""
    shapes = {name: SHAPES[int(name[1:])] for name in order if name in factors}
    alike = list(dict.fromkeys(shapes.values()))  # torch keeps the factors of one shape together
    compressed = sorted(shapes, key=lambda name: alike.index(shapes[name]))
    state.q_memory_dict[0] = torch.cat([factors[name].reshape(-1) for name in compressed])
    elements = sum(shapes[name][0] * factors[name].shape[1] for name in compressed)
    state.p_memory_dict[0] = torch.empty(elements, dtype=torch.float64)


def run_power_sgd(rank, world_size, matrix_rank):
    state = PowerSGDState(None, matrix_rank, start_powerSGD_iter=2)
    ours, handle = warmed_up(rank, lambda ddp: gradwire.attach(ddp, f"powersgd:rank={matrix_rank},start_iter=2"))
    theirs, _ = warmed_up(rank, lambda ddp: ddp.register_comm_hook(state, powerSGD_hook))
    (bucket,) = handle.stats().buckets
    factors = fields(handle, "q")
    begin_at(state, factors, bucket.parameters)
    given = [gradients(rank, step, SHAPES, torch.float64) for step in range(2, 2 + STEPS)]
    steps = [(average(ours, numbers), average(theirs, numbers)) for numbers in given]
    residuals = fields(handle, "residual")
    handle.close()
    held = [residuals[name].view(-1) for name in bucket.parameters]
    theirs_held = state.error_dict[0].split([residual.numel() for residual in held])
    return steps, dict(zip(bucket.parameters, zip(held, theirs_held, strict=True), strict=True))


@pytest.mark.parametrize(("world_size", "matrix_rank"), [(2, 1), (2, 2), (2, 3), (3, 2)])
def test_powersgd_from_the_same_factors_equals_torch_s_hook_to_rounding_in_float64(ranks, world_size, matrix_rank):
    for steps, held in ranks.run(run_power_sgd, world_size, matrix_rank):
        for ours, expected in steps:
            for name in expected:
                torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=1e-11)
        for name, (residual, expected) in held.items():
            if name in ("p1", "p3"):  # sent whole; torch then holds back what the ranks differ by, which averages to 0
                assert not residual.any()
            else:
                torch.testing.assert_close(residual, expected, rtol=0, atol=1e-11)
                assert residual.norm() > 1
