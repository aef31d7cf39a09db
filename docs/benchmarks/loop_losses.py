"""Validation losses of training loops without DDP, with and without `compress_group`, and the bytes against a formula.

    python docs/benchmarks/loop_losses.py flat FSDP1 Muon --json docs/results/loops/losses.json
    python docs/benchmarks/loop_losses.py ZeRO-1 ZeRO-2     (after pip install deepspeed)

Each loop of loops.py trains on two Gloo ranks of this host for 400 steps, from three seeds. What all calls of a rank send,
with weights that are gathered uncompressed, is what the loopback device counts: nothing else should use it meanwhile.
"""

import os
import random
import statistics
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from driver import about, parser_of, write_results
from loops import LOOPS, batches, numel_of
from torch import nn

import gradwire
from gradwire.experiments.results.statistics import interval

RANKS, STEPS, SEEDS = 2, 400, (0, 1, 2)
WIDTHS = {"Muon": 384}
WIDTH = 512  # of the others


def computed_bytes(loop: str) -> float:
    """Return the bytes that compressed calls of a step send on a rank, by int8's 8 bits and 4 bytes a block of 128."""
    numbers = 2 * WIDTHS["Muon"] ** 2 if loop == "Muon" else numel_of(WIDTH)
    times = 1 if loop in ("FSDP1", "Muon") else 2  # a reduce-scatter is half of an all-reduce
    return times * (RANKS - 1) / RANKS * numbers * (1 + 4 / 128)


def computed_rest(loop: str) -> float:
    """Return the bytes of a step that a rank sends uncompressed: weights, and gradients of vectors beside Muon."""
    if loop == "flat":
        return 0.0
    width = WIDTHS.get(loop, WIDTH)
    if loop == "Muon":
        return 4 * (RANKS - 1) * (width**2 + 2 / RANKS * (numel_of(width) - 2 * width**2))
    return 4 * (RANKS - 1) / RANKS * numel_of(width)


def on_loopback() -> int:
    """Return the bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def trained(name: str, seed: int, *, compressed: bool) -> tuple[float, float, float]:
    """Train. Return the validation loss, and the bytes that a rank sent in a step: compressed calls, and all."""
    torch.manual_seed(seed)
    loop = LOOPS[name](WIDTHS.get(name, WIDTH))
    handle = gradwire.compress_group(loop.group) if compressed else None
    dist.barrier()
    before = on_loopback()
    for _, (inputs, answers) in zip(range(STEPS), batches(seed, dist.get_rank()), strict=False):
        loop.step(inputs, answers)
    dist.barrier()
    everything = (on_loopback() - before) / RANKS / STEPS
    with torch.no_grad():
        held_out = [
            nn.functional.mse_loss(loop.model(x), y) for _, (x, y) in zip(range(64), batches(99, 0), strict=False)
        ]
    sent = 0.0
    if handle is not None:
        sent = handle.stats().bytes_sent / STEPS
        handle.close()
    return float(torch.stack(held_out).mean()), sent, everything


def told(what: str, found: float, computed: float) -> None:
    """Print bytes of a step beside those of a formula."""
    print(f"{what}: {found:.0f} bytes a step, computed {computed:.0f} ({100 * (found / computed - 1):+.2f} %)")


def run(rank: int, port: int, asked: Namespace) -> None:
    """Train loops on a rank; the first one prints and writes."""
    found = {}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for loop in asked.loops:
        both = [(trained(loop, seed, compressed=False), trained(loop, seed, compressed=True)) for seed in SEEDS]
        changes = [100 * (ours[0] / plain[0] - 1) for plain, ours in both]
        losses = ", ".join(f"{plain[0]:.4f} > {ours[0]:.4f}" for plain, ours in both)
        _, sent, everything = both[0][1]
        computed = computed_bytes(loop)
        if rank == 0:
            print(f"{loop}: int8 {statistics.mean(changes):+.2f} ± {interval(changes):.2f} % ({losses})")
            told(f"{loop}, compressed calls", sent, computed)
            told(f"{loop}, all calls", everything, computed + computed_rest(loop))
            pairs = {"none": [plain[0] for plain, _ in both], "int8": [ours[0] for _, ours in both]}
            found[loop] = {"losses": pairs, "sent_bytes_per_step": sent, "on_loopback_per_step": everything}
    if rank == 0:
        write_results(asked.json, {**about(), "seeds": SEEDS, "steps": STEPS, "loops": found})
    dist.destroy_process_group()


def main() -> None:
    """Train the loops that are asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("loops", nargs="+", choices=LOOPS)
    parser.add_argument("--json", type=Path)
    mp.spawn(run, (random.randrange(20000, 30000), parser.parse_args()), RANKS)


if __name__ == "__main__":
    main()
