"""Trials of 16-bit gradients whose compressor is swapped: in no step is any of them lost, whatever rounding does."""

from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire

from ..hooks.given import Given, average, gradients
from .gradients import held_back

SPECS = (
    "int8:block=8,error_feedback=1",
    "int4:block=8,error_feedback=1",
    "topk:ratio=0.1",
    "onebit:block=8,error_feedback=1",
    "powersgd:rank=1,min_compression_rate=0",
    "chunktopk:ratio=0.2,chunk=8,error_feedback=1",
    "topk:ratio=0.2,start_iter=3",
    "int8:block=8,error_feedback=1",
)
HOLDING = 4  # steps after which any of them holds something back
EXACT = 1e-6  # of the largest number


@dataclass(frozen=True)
class Trial:
    """`swaps`: the compressor from each step on, None where it stays."""

    seed: int
    world_size: int
    ours: bool
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, object]
    swaps: tuple[str | None, ...]


def drawn(seed):
    """The trial of a seed."""
    source = Random(f"halves {seed}")
    shapes = tuple(
        tuple(source.randint(1, 12) for _ in range(source.randint(1, 3))) for _ in range(source.randint(0, 5))
    )
    shapes = ((source.randint(6, 12), source.randint(6, 12)), *shapes)
    options = {"bucket_cap_mb": source.choice((0.0002, 0.001, 25)), "find_unused_parameters": source.random() < 0.4}
    swaps = [source.choice(SPECS) if source.random() < 0.4 else None for _ in range(source.randint(5, 9))]
    swaps[0] = source.choice(SPECS)
    late = source.randrange(HOLDING, len(swaps))
    now = [each for each in swaps[:late] if each][-1]
    swaps[late] = source.choice([each for each in SPECS if each != now])
    world_size, ours = source.choice((2, 2, 3)), source.random() < 0.6
    dtype = source.choice((torch.bfloat16, torch.float16))
    return Trial(seed, world_size, ours, dtype, shapes, options, tuple(swaps))


def mean(flat, world_size):
    """Of all ranks."""
    flat = flat.clone()
    dist.all_reduce(flat)
    return flat / world_size


def held(handle, model):
    """What this rank holds back, flat, in float64."""
    found = held_back(handle.state_dict())
    flat = []
    for name, parameter in model.module.named_parameters():
        total = torch.zeros(parameter.numel(), dtype=torch.float64)
        for first, numbers in found.get(name, ()):
            total[first : first + numbers.numel()] += numbers
        flat.append(total)
    return torch.cat(flat)


def train(rank, world_size, trial):
    """The steps in which gradient was lost or made up; in words."""
    spec, wrong, met = trial.swaps[0], [], False
    if trial.ours:
        model = gradwire.DistributedDataParallel(Given(trial.shapes, trial.dtype), compressor=spec, **trial.options)
        handle = model.compression
    else:
        model = TorchDDP(Given(trial.shapes, trial.dtype), **trial.options)
        handle = gradwire.attach(model, spec)
    before = held(handle, model)
    for step, swap in enumerate(trial.swaps):
        if swap is not None and step:
            met |= swap != spec and bool(before.any())
            handle.swap(spec := swap)
        given = [each.to(trial.dtype) for each in gradients(rank, step, trial.shapes)]
        averages = average(model, given)
        came, after = torch.cat([each.double().flatten() for each in averages.values()]), held(handle, model)
        due = mean(torch.cat([each.double().flatten() for each in given]) + before, world_size)
        off = float((due - came - mean(after, world_size)).abs().max() / due.abs().max())
        wrong += [f"step {step} is off by {off:.1g}"] if off > EXACT else []
        before = after
    handle.close()
    return ", ".join(wrong if met else [*wrong, "nothing was held back at a swap"])


def broken(trial, answers):
    """Sentences on all ranks where something is wrong."""
    return [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer]
