"""Trials of memory formats: contiguous and channels_last parameters beside each other, changed between steps and saves.

Averages add up to the gradients given, element by element, once what is held back was sent.
"""

from dataclasses import dataclass
from random import Random

import torch

from ..hooks.given import gradients
from .accounts import Account, mean

SPECS = (
    "int4",
    "int8:error_feedback=true",
    "int4:rotate=true",
    "onebit:error_feedback=1",
    "topk:ratio=0.2",
    "powersgd:rank=1,min_compression_rate=0",
    "acp-powersgd:rank=1,min_compression_rate=0",
    "topk:ratio=0.2,start_iter=2",
)
EXACT = 1e-5  # of the largest number
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Trial:
    """`turned`: the parameters that have their other format from each step on. `resumes`: how a new model takes the state of
    the one before, then: None for not at all, else the formats of its parameters, "as it is" or "contiguous".
    """

    seed: int
    world_size: int
    ours: bool
    spec: str
    shapes: tuple[tuple[int, ...], ...]
    turned: tuple[tuple[int, ...], ...]
    resumes: tuple[str | None, ...]
    options: dict[str, object]


def drawn(seed):
    source = Random(f"formats {seed}")
    shapes = tuple(
        tuple(source.randint(1, 6) for _ in range(source.choice((1, 4, 4, 5)))) for _ in range(source.randint(2, 6))
    )
    shapes = (tuple(source.randint(2, 6) for _ in range(4)), *shapes)
    axes = [place for place, shape in enumerate(shapes) if len(shape) in LAST]
    steps = source.randint(4, 7)
    turned = [tuple(place for place in axes if source.random() < 0.25) for _ in range(steps)]
    spec = source.choice(SPECS)
    late = source.randrange(3 if "start_iter" in spec else 1, steps)  # something is held back by then
    turned[late] = tuple({0, *turned[late]})
    resumes = tuple(
        source.choice((None, None, None, "as it is", "contiguous")) if step else None for step in range(steps)
    )
    resumes = tuple(None if step == late else how for step, how in enumerate(resumes))
    options = {"bucket_cap_mb": source.choice((0.0005, 0.002, 25)), "gradient_as_bucket_view": source.random() < 0.5}
    world_size, ours = source.choice((2, 2, 3)), source.random() < 0.6
    return Trial(seed, world_size, ours, spec, shapes, tuple(turned), resumes, options)


def turn(parameter):
    """Give a parameter its other format, as `model.to(memory_format=...)` does."""
    last = LAST[parameter.dim()]
    now = torch.contiguous_format if parameter.is_contiguous(memory_format=last) else last
    parameter.data = parameter.data.contiguous(memory_format=now)


def resumed(trial, account, how):
    state = account.handle.state_dict()
    account.handle.close()
    fresh = Account(trial.ours, trial.spec, trial.shapes, **trial.options)
    if how == "as it is":
        for mine, theirs in zip(fresh.model.parameters(), account.model.parameters(), strict=True):
            mine.data = theirs.data.clone(memory_format=torch.preserve_format)
    fresh.handle.load_state_dict(state)
    return fresh


def train(rank, world_size, trial):
    """Where averages do not add up to gradients; in words."""
    account, met = Account(trial.ours, trial.spec, trial.shapes, **trial.options), False
    due, came = ([torch.zeros(shape, dtype=torch.float64) for shape in trial.shapes] for _ in range(2))
    for step, (turned, how) in enumerate((*zip(trial.turned, trial.resumes, strict=True), ((), None))):
        before = [parameter.stride() for parameter in account.model.parameters()]
        if how:
            account = resumed(trial, account, how)
        for place in turned:
            turn(account.model.module.get_parameter(f"p{place}"))
        held = account.held()
        after = [parameter.stride() for parameter in account.model.parameters()]
        met |= any(a != b and each.any() for a, b, each in zip(before, after, held, strict=True))
        if step == len(trial.turned):
            account.handle.swap("none")
        given = gradients(rank, step, trial.shapes)
        for total, numbers in zip(came, account.average(given), strict=True):
            total += numbers.double()
        for total, numbers in zip(due, mean([each.double().flatten() for each in given]), strict=True):
            total += numbers.view(total.shape)
    account.handle.close()
    off = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(due, came, strict=True)]
    found = [f"p{place} is off by {by:.1g}" for place, by in enumerate(off) if not by <= EXACT]
    return ", ".join(found if met else [*found, "no format changed while something was held back"])
