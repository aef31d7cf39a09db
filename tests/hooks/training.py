"""Training of small models on one rank, and what the tests ask of it."""

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

RATE = 0.05
TINY_BUCKETS = {"bucket_cap_mb": 0.001}  # 1 KiB


@dataclass(frozen=True)
class Case:
    """A model, the shape of its float32 inputs, and how DDP wraps it."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 12)
    options: Mapping[str, Any] = field(default_factory=lambda: TINY_BUCKETS)


@dataclass(frozen=True)
class Outcome:
    """The trained parameters; synced steps; the gradient that never came back, relative to the largest given."""

    parameters: list[torch.Tensor]
    steps: int
    lost: float


def batch(shape, rank, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model, inputs):
    return model(inputs).abs().square().float().mean()


def wide_zeros(parameter):
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float64), requires_grad=False)


class Ledger:
    """In float64: all gradients that this rank gave, and all averages that it got."""

    def __init__(self, model):
        self.parameters = dict(model.named_parameters())
        self.given = {name: wide_zeros(parameter) for name, parameter in self.parameters.items()}
        self.got = {name: wide_zeros(parameter) for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._give, name))

    def _give(self, name, gradient):
        self.given[name] += gradient

    def step(self):
        """Note the averages, descend, and clear them."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self.got[name] += parameter.grad
                parameter.data.sub_(parameter.grad, alpha=RATE)
                parameter.grad = None

    def lost(self):
        """The largest difference between what all ranks gave and what came back, relative to the largest given."""
        differences = []
        for name, given in self.given.items():
            if not given.numel():
                continue
            dist.all_reduce(given.div_(dist.get_world_size()))
            differences.append((self.got[name] - given).abs().max() / given.abs().max().clamp(min=1e-3))
        return torch.stack(differences).max().item()


def backward(ddp, case, rank, step, micro_batches):
    """One synced backward, after those of all but the last micro-batch, which stay local."""
    for index in range(micro_batches):
        with nullcontext() if index == micro_batches - 1 else ddp.no_sync():
            loss_of(ddp, batch(case.shape, rank, 100 * index + step)).backward()


def train(rank, spec, case, steps=4, micro_batches=1, join=False):
    """Train; then swap to no compression, and let a step of next to no gradient bring out what was held back."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(case.build(), **case.options)
    ledger = Ledger(ddp.module)
    handle = gradwire.attach(ddp, spec) if spec else None
    with ddp.join() if join else nullcontext():
        for step in range(steps):
            backward(ddp, case, rank, step, micro_batches)
            ledger.step()
    parameters = [parameter.detach().clone() for parameter in ddp.parameters()]
    if handle is None:
        return Outcome(parameters, steps, 0.0)
    counted = handle.state_dict()["step"]
    handle.swap("none")
    (loss_of(ddp, batch(case.shape, rank, steps)) * 1e-12).backward()
    ledger.step()
    handle.close()
    return Outcome(parameters, counted, ledger.lost())


def same(left, right):
    """Whether two lists of tensors have the same bits."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
