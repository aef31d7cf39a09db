"""Validation losses of training loops without DDP, with and without `compress_group`, and the bytes against a formula.

    python docs/benchmarks/loop_losses.py flat FSDP1 Muon

Each loop trains on two Gloo ranks of this host for 400 steps, from three seeds. The loops are those of
docs/loops-without-ddp.md: a flat all-reduce, FSDP1, and Muon with a reduce-scatter and an all-gather.
"""

import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import gradwire
from gradwire.experiments.workloads.muon import orthonormalized

RANKS, STEPS, BATCH, SEEDS = 2, 400, 32, (0, 1, 2)
WIDTHS = {"flat": 512, "FSDP1": 512, "Muon": 384}
STUDENT_T = 4.303  # of 95 % and three seeds


def net(width: int) -> nn.Sequential:
    """Return a network with two square matrices of a width."""
    widths = [64, width, width, width, 8]
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


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


def flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Average all gradients by one all-reduce."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    joined = torch.cat([grad.view(-1) for grad in grads])
    dist.all_reduce(joined)
    for grad, part in zip(grads, joined.div_(RANKS).split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
    optimizer.step()


def sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leave all to FSDP1, which has reduced its gradients in backward."""
    optimizer.step()


def muon(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give each square matrix to one rank, which updates it for all; average the rest by all-reduces."""
    matrices = [each for each in model.parameters() if each.shape == (WIDTHS["Muon"],) * 2]
    mine = matrices[dist.get_rank()]
    total = torch.empty_like(mine)
    under_way = dist.reduce_scatter(total, [each.grad for each in matrices], async_op=True)
    for parameter in model.parameters():
        if parameter.shape != (WIDTHS["Muon"],) * 2 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(RANKS)
    under_way.wait()
    with torch.no_grad():
        mine.sub_(0.01 * orthonormalized(total))
        dist.all_gather([each.data for each in matrices], mine.data.clone())
    for each in matrices:
        each.grad = None
    optimizer.step()


LOOPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {"flat": flat, "FSDP1": sharded, "Muon": muon}


def computed_bytes(loop: str) -> float:
    """Return the bytes that compressed calls of a step send on a rank, by int8's 8 bits and 4 bytes a block of 128."""
    width = WIDTHS[loop]
    numbers = 2 * width**2 if loop == "Muon" else sum(parameter.numel() for parameter in net(width).parameters())
    times = 2 if loop == "flat" else 1  # a reduce-scatter is half of an all-reduce
    return times * (RANKS - 1) / RANKS * numbers * (1 + 4 / 128)


def trained(loop: str, seed: int, *, compressed: bool) -> tuple[float, float]:
    """Train. Return the validation loss, and the bytes that compressed calls of a step sent."""
    handle = gradwire.compress_group() if compressed else None
    torch.manual_seed(seed)
    model: nn.Module = net(WIDTHS[loop])
    if loop == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _, (inputs, answers) in zip(range(STEPS), batches(seed, dist.get_rank()), strict=False):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), answers).backward()
        LOOPS[loop](model, optimizer)
    with torch.no_grad():
        held_out = [nn.functional.mse_loss(model(x), y) for _, (x, y) in zip(range(64), batches(99, 0), strict=False)]
    sent = 0.0
    if handle is not None:
        sent = handle.stats().bytes_sent / STEPS
        handle.close()
    return float(torch.stack(held_out).mean()), sent


def run(rank: int, port: int, loops: list[str]) -> None:
    """Train loops on a rank; the first one prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for loop in loops:
        both: list[tuple[Any, Any]] = [
            (trained(loop, seed, compressed=False), trained(loop, seed, compressed=True)) for seed in SEEDS
        ]
        changes = [100 * (ours[0] / plain[0] - 1) for plain, ours in both]
        half = STUDENT_T * statistics.stdev(changes) / math.sqrt(len(changes))
        losses = ", ".join(f"{plain[0]:.4f} > {ours[0]:.4f}" for plain, ours in both)
        sent, computed = both[0][1][1], computed_bytes(loop)
        if rank == 0:
            print(f"{loop}: int8 {statistics.mean(changes):+.2f} ± {half:.2f} % ({losses})")
            print(f"{loop}: {sent:.0f} bytes a step, computed {computed:.0f} ({100 * (sent / computed - 1):+.2f} %)")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(run, (random.randrange(20000, 30000), sys.argv[1:]), RANKS)
