"""Step times of torch's DDP and hooks beside gradwire's, by its own DDP and by `attach`, turn by turn in one run."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from ..parts import BENCHMARKS
from .checks import check
from .ranks import GIGABIT

sys.path.insert(0, str(BENCHMARKS))
import step_time

SPECS = ("none", "bf16", "int8", "int4", "onebit", "powersgd:rank=4", "topk:ratio=0.01")
TURNS, TRIED = 10, 2  # of each case, on a GPU and on CPUs
BYTES, TOLERANCE = 25_000_000, 1.25


def model(world):
    """Return a transformer; on CPUs, which only try the check, two small layers."""
    if world.cpu:
        return nn.Sequential(nn.Embedding(step_time.VOCABULARY, 64), nn.Linear(64, step_time.VOCABULARY))
    return step_time.Transformer().to(world.device)


class Case(step_time.Case):
    """A case on the device of a rank, whose steps end when the device has done them."""

    def __init__(self, world, name):
        def build():
            return model(world)

        super().__init__(name, build, step_time.next_byte_loss)
        self._world = world

    def step(self, tokens):
        """One timed step, all ranks starting together."""
        self._world.wait()
        self._world.meet()
        start = time.perf_counter()
        self.loss(self.model, tokens.to(self._world.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._world.wait()
        self.rounds[-1].append(time.perf_counter() - start)
        self.processor_seconds[-1].append(0.0)


def cases(world):
    """Return torch's cases and gradwire's; torch's PowerSGD fails on Gloo with more than one bucket."""
    names = ["torch:none@25", "torch:bf16@25", f"torch:powersgd@{4000 if world.cpu else 25}"]
    names += [f"{kind}{spec}@25" for spec in SPECS for kind in ("gradwire:", "")]
    return [Case(world, name) for name in names]


@check()
def pace(world):
    """Where sockets are paced, an all-reduce takes as long as they need for its bytes, and not much longer."""
    rate = int(os.environ.get("PACE_BYTES", 0))
    if rate:
        tensor = torch.ones(BYTES // 4, device=world.device)
        dist.all_reduce(tensor)
        world.wait()
        world.meet()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        world.wait()
        sent = 2 * (world.size - 1) / world.size * BYTES
        world.told = {"paced Gbit/s": rate / GIGABIT, "Gbit/s": sent / (time.perf_counter() - began) / GIGABIT}
        assert world.told["Gbit/s"] <= TOLERANCE * world.told["paced Gbit/s"], "the sockets are not paced"


@check()
def step_times(world):
    """Seconds of a step, and how many times as fast it is as torch's DDP in the same turns."""
    each, generator = cases(world), torch.Generator().manual_seed(world.rank)
    step_time.play_round(each, TRIED if world.cpu else TURNS, generator)
    world.told = {row["case"]: {name: row[name] for name in ("median_s", "speed", "speed_low", "speed_high")}
                  for row in (case.figures(each[0]) for case in each)}  # fmt: skip
