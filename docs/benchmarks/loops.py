"""Training loops without DDP, as docs/loops-without-ddp.md has them, for loop_losses.py and loop_times.py."""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from gradwire.experiments.workloads.muon import orthonormalized

BATCH = 32


@dataclass(frozen=True)
class Loop:
    """A model, one step of its training with inputs and answers, and the group whose calls are to be compressed."""

    model: nn.Module
    step: Callable[[Tensor, Tensor], None]
    group: dist.ProcessGroup | None = None


def net(width: int) -> nn.Sequential:
    """Return a network with two square matrices of a width."""
    widths = [64, width, width, width, 8]
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def numel_of(width: int) -> int:
    """Return the number of parameters of a network."""
    return sum(parameter.numel() for parameter in net(width).parameters())


def batches(seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs, and noisy answers of a fixed random network."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        teacher = net(64)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        inputs = torch.randn(BATCH, 64, generator=generator)
        noise = torch.randn(BATCH, 8, generator=generator)
        yield inputs, 4 * teacher(inputs).detach() + 0.1 * noise


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all loops."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def trained_by(model: nn.Module, reduced: Callable[[], None]) -> Loop:
    """Return the loop that calls a reduction between backward and Adam's step."""
    optimizer = adam(model)

    def step(inputs: Tensor, answers: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), answers).backward()
        reduced()
        optimizer.step()

    return Loop(model, step)


def alone(width: int) -> Loop:
    """Train on this rank alone."""
    return trained_by(net(width), lambda: None)


def flat(width: int) -> Loop:
    """Average all gradients by one all-reduce."""
    model = net(width)

    def reduced() -> None:
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        joined = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(joined)
        joined /= dist.get_world_size()
        for grad, part in zip(grads, joined.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    return trained_by(model, reduced)


def sharded(width: int) -> Loop:
    """Leave all to FSDP1, which reduces gradients in backward."""
    return trained_by(FullyShardedDataParallel(net(width), device_id=torch.device("cpu")), lambda: None)


def muon(width: int) -> Loop:
    """Give each square matrix to one of two ranks, which updates it for all; average the rest by all-reduces."""
    model = net(width)
    matrices = [each for each in model.parameters() if each.shape == (width, width)]
    others = [each for each in model.parameters() if each.shape != (width, width)]

    def reduced() -> None:
        mine = matrices[dist.get_rank()]
        total = torch.empty_like(mine)
        under_way = dist.reduce_scatter(total, [each.grad for each in matrices], async_op=True)
        for parameter in others:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        under_way.wait()
        with torch.no_grad():
            mine.sub_(0.01 * orthonormalized(total))
            dist.all_gather([each.data for each in matrices], mine.data.clone())
        for each in matrices:
            each.grad = None

    return trained_by(model, reduced)


def zero(width: int, *, stage: int) -> Loop:
    """Leave all to DeepSpeed's ZeRO, without its own collectives in shared memory, which take minutes to compile."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # an extra package, which only these loops need

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed("gloo")
    model = net(width)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam(model), config=config)

    def step(inputs: Tensor, answers: Tensor) -> None:
        engine.backward(nn.functional.mse_loss(engine(inputs), answers))
        engine.step()

    return Loop(model, step, engine.optimizer.dp_process_group)


LOOPS: dict[str, Callable[[int], Loop]] = {
    "flat": flat,
    "FSDP1": sharded,
    "Muon": muon,
    "ZeRO-1": partial(zero, stage=1),
    "ZeRO-2": partial(zero, stage=2),
}
