"""Step times of training loops without DDP, with and without `compress_group`, turn by turn in one run on one network.

Start it once on every host, by torchrun or by gradwire netlab:

    gradwire netlab --hosts 2 --rate 1gbit -- python docs/benchmarks/loop_times.py --rate 1gbit --json loops.json

The loops are those of loops.py; ZeRO-1 and ZeRO-2 need `pip install deepspeed`. Each takes turns of some steps
uncompressed, then with int8.
Times are medians of turns. The ratio is the median of those of two turns beside each other, with its lowest and highest.
`alone` is the step of `flat` without its all-reduce. `small` are 200 all-reduces of 4 kB, which are not compressed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from driver import about, parser_of, write_results
from loops import LOOPS, alone, batches, numel_of

import gradwire

WIDTHS = {"Muon": 512}
WIDTH = 1024  # of the others
SMALL_CALLS = 200


def small_step() -> Callable[[], None]:
    """Return all-reduces that stay below the limit."""
    tensor = torch.ones(1000)

    def step() -> None:
        for _ in range(SMALL_CALLS):
            dist.all_reduce(tensor)
            tensor.fill_(1.0)

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Return the time of a step, in the mean of some."""
    step()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def measured(
    name: str, step: Callable[[], None], turns: int, steps: int, group: dist.ProcessGroup | None = None
) -> dict[str, float | str]:
    """Take turns. Return the medians and their ratios."""
    plain, ours = [], []
    for _ in range(turns):
        plain.append(seconds(step, steps))
        handle = gradwire.compress_group(group)
        ours.append(seconds(step, steps))
        handle.close()
    ratios = [without / with_ for without, with_ in zip(plain, ours, strict=True)]
    return {
        "loop": name,
        "plain_s": statistics.median(plain),
        "int8_s": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def main() -> None:
    """Measure all loops; rank 0 prints and writes."""
    parser = parser_of(__doc__)
    parser.add_argument("--loops", nargs="*", default=["flat", "FSDP1", "Muon", "alone", "small"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn")
    parser.add_argument("--rate", default="", help="what the network is, for the file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gradwire.init_process_group()
    rows = [row_of(loop, options) for loop in options.loops]
    if dist.get_rank() == 0:
        for row in rows:
            print(row)
        write_results(options.json, about() | {"rate": options.rate, "ranks": dist.get_world_size(), "loops": rows})
    dist.destroy_process_group()


def row_of(name: str, options: argparse.Namespace) -> dict[str, float | str]:
    """Measure one of the loops."""
    if name == "small":
        return measured(name, small_step(), options.turns, 1)
    width = WIDTHS.get(name, WIDTH)
    torch.manual_seed(0)
    loop = (LOOPS | {"alone": alone})[name](width)
    data = batches(0, dist.get_rank())
    row = measured(name, lambda: loop.step(*next(data)), options.turns, options.steps, loop.group)
    return row | {"parameters": numel_of(width)}


if __name__ == "__main__":
    main()
