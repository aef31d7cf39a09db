"""Trials of several losses, each with an averaged backward of its own, as PCGrad and GradNorm take them.

Without error feedback a task's averages are those of a training that has this task alone, to the bit. With it they are
others, since the residual of one task goes to the next; then the handle warns once, and names what is right.
"""

import warnings
from dataclasses import dataclass
from random import Random

import torch

from ..hooks.given import gradients
from .accounts import SHAPES, Account

SPECS = (
    "int8",
    "int4:error_feedback=false",
    "int4:rotate=true,error_feedback=false",
    "int2:error_feedback=false",
    "topk:ratio=0.2,error_feedback=false",
    "ternary:error_feedback=false",
)
ASKED = "error_feedback=false"


@dataclass(frozen=True)
class Trial:
    """`sizes`: the factor of each task's gradients."""

    seed: int
    world_size: int
    ours: bool
    spec: str
    sizes: tuple[float, ...]
    steps: int
    bucket_cap_mb: float


def drawn(seed):
    source = Random(f"tasks {seed}")
    sizes = tuple(10.0 ** source.uniform(-3, 3) for _ in range(source.randint(2, 4)))
    world_size, ours = source.choice((2, 2, 3)), source.random() < 0.6
    cap = source.choice((0.0005, 25))
    return Trial(seed, world_size, ours, source.choice(SPECS), sizes, source.randint(3, 5), cap)


def train(rank, world_size, trial):
    """Where a task's averages depend on the others; in words."""
    tasks = range(len(trial.sizes))
    together, found = trained(rank, trial, trial.spec, tasks)
    for task in tasks:
        alone, _ = trained(rank, trial, trial.spec, [task])
        if not same(together[task], alone[task]):
            found.append(f"task {task} depends on the others")
    spec = "int4:error_feedback=true"
    mixed, said = trained(rank, trial, spec, tasks)
    if same(mixed[1], trained(rank, trial, spec, [1])[0][1]):
        found.append("nothing befell task 1: with error feedback its averages do not depend on the others")
    found += [] if any(ASKED in each for each in said) else [f"no warning names {ASKED}, but {said}"]
    return ", ".join(found)


def same(left, right):
    return all(map(torch.equal, left, right))


def trained(rank, trial, spec, tasks):
    """{task: its averages of each step, flat}, and the texts of warnings."""
    account, averages = Account(trial.ours, spec, SHAPES, bucket_cap_mb=trial.bucket_cap_mb), {t: [] for t in tasks}
    optimizer = torch.optim.SGD(account.model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(trial.steps):
            for task in tasks:
                numbers = gradients(rank, 10 * step + task, SHAPES)
                came = account.average([trial.sizes[task] * each for each in numbers])
                averages[task].append(torch.cat([each.flatten() for each in came]))
            for parameter in account.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
    account.handle.close()
    return averages, [str(each.message) for each in said]
