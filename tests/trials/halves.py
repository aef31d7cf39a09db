"""Trials of 16-bit gradients whose compressor is swapped: in no step is any of them lost, whatever rounding does."""

from dataclasses import dataclass
from random import Random

import torch

from ..hooks.given import gradients
from .accounts import Account

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
EXACT = 1e-6  # of a parameter's largest number


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


def train(rank, world_size, trial):
    """The steps in which gradient was lost or made up; in words."""
    spec, wrong, met = trial.swaps[0], [], False
    account = Account(trial.ours, spec, trial.shapes, trial.dtype, **trial.options)
    for step, swap in enumerate(trial.swaps):
        if swap is not None and step:
            met |= swap != spec and any(each.any() for each in account.held())
            account.handle.swap(spec := swap)
        _, off = account.step([each.to(trial.dtype) for each in gradients(rank, step, trial.shapes)])
        wrong += [f"step {step} is off by {max(off):.1g}"] if not max(off) <= EXACT else []
    account.handle.close()
    return ", ".join(wrong if met else [*wrong, "nothing was held back at a swap"])
