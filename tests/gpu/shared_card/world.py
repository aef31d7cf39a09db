"""A rank: it runs checks one after the other, and the first rank writes what all found."""

import contextlib
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .checks import checks_in

LIMIT = timedelta(seconds=30)  # of all groups
UNNOTICED = 9  # exit code of a rank that trains on while another one is dead
UNSET = ("raw", "trainings", "changes")  # files whose checks run with memory that is NaN until it is written


class World:
    """What a check is given. `group`: None for the default one, of NCCL or, with `cpu`, of Gloo. `gloo`: the control.

    Whatever a check adds to `told` stands beside its verdict.
    """

    def __init__(self, *, cpu):
        self.cpu, self.rank, self.size = cpu, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cpu") if cpu else torch.device("cuda", 0)
        if not cpu:
            torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        dist.init_process_group("gloo" if cpu else "nccl", timeout=LIMIT)
        self.gloo = dist.new_group(backend="gloo", timeout=LIMIT)  # the same kernels, carried by another backend
        self.told = {}

    def wait(self):
        """Wait for all that the GPU was given."""
        if not self.cpu:
            torch.cuda.synchronize()

    def everyone(self, value):
        """Return each rank's value, over Gloo."""
        found = [None] * self.size
        dist.all_gather_object(found, value, group=self.gloo)
        return found

    def meet(self):
        """Have all ranks come here before any goes on."""
        dist.barrier(group=self.gloo)


def run(world, name, one):
    """Return the row of a check that all ranks have run."""
    world.meet()
    world.told, began, error = {}, time.perf_counter(), ""
    try:
        one.function(world)
        world.wait()
    except Exception:
        error = traceback.format_exc()[-1500:]
        print(error, flush=True)
    found = world.everyone((error, time.perf_counter() - began))
    wrong = {rank: text for rank, (text, _) in enumerate(found) if text}
    seconds = round(max(taken for _, taken in found), 2)
    return {"check": name, "ok": not wrong, "seconds": seconds, "told": wrong or world.told}


def main(file, rows, cpu, names):
    """Run checks of a file, and write a line before and after each. After one that fails all ranks end, to begin anew."""
    torch.use_deterministic_algorithms(file in UNSET, warn_only=True)
    world, rows = World(cpu=cpu == "cpu"), Path(rows)
    table = checks_in(file, world.size)
    for name in names:
        if world.rank == 0:
            append(rows, {"begun": name})
        row = run(world, name, table[name])
        if world.rank == 0:
            append(rows, row)
        world.meet()
        if not row["ok"]:
            os._exit(0)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def append(path, row):
    """Add a line of JSON to a file."""
    with path.open("a") as file:
        file.write(json.dumps(row, default=str) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
