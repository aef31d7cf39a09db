"""A training that torchrun starts anew where a rank or a host has died: it goes on from its last checkpoint.

python elastic_job.py FOLDER STEPS FATAL: FATAL is "rank" or "host", of which the last one dies in the middle of a step.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

SPEC, LIMIT, DEATH = "topk:ratio=0.05", timedelta(seconds=30), 3


def train(folder, steps, fatal):
    """Up to so many steps, each with a checkpoint; those that there are already are not made again."""
    rank, ranks, path = dist.get_rank(), dist.get_world_size(), Path(folder, "checkpoint.pt")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), bucket_cap_mb=0.004)
    handle = gradwire.attach(model, SPEC, timeout=LIMIT)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    saved = torch.load(path, weights_only=True) if path.exists() else None
    if saved is not None:
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.scatter_state_dict(saved["compression"])
    first = 0 if saved is None else saved["step"]
    for step in range(first, steps):
        if step == DEATH and first == 0 and rank == ranks - 1:
            model.register_forward_hook(lambda *_: die(fatal))
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        write(path, {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, handle)
    state = handle.state_dict()
    handle.close()
    return state


def write(path, parts, handle):
    """A whole checkpoint, or the one before it."""
    compression = handle.gather_state_dict()  # on all ranks
    if compression:
        torch.save({**parts, "compression": compression}, new := path.with_suffix(".new"))
        new.rename(path)
        torch.save({**parts, "compression": compression}, path.with_suffix(f".{parts['step']}"))


def batch(rank, step):
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(1000 * rank + step))


def die(fatal):
    if fatal == "host":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    folder, steps, fatal = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if int(os.environ["WORLD_SIZE"]) == 1 and not Path(folder, "checkpoint.pt").exists():
        while True:  # the other host has not come yet: torchrun starts this one anew when it does
            time.sleep(0.1)
    dist.init_process_group("gloo", timeout=LIMIT)
    ranks = dist.get_world_size()
    train(folder, steps, fatal)
    Path(folder, f"done-{dist.get_rank()}").write_text(str(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
