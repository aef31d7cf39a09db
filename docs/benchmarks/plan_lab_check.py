"""`gradwire plan --sites` against four sites in a network lab with delay, in real time and as root: python plan_lab_check.py

The sites meet at a rendezvous on host 0 and connect directly. Before each round they wait for PAUSE seconds, as if they
computed. A round also has arithmetic, on the cores of this host, so the rounds without delay are the baseline.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from itertools import pairwise, product

import torch
from driver import parser_of
from torch import nn

import gradwire
from gradwire.experiments.network.lab.config import NetlabConfig
from gradwire.experiments.network.lab.launcher import run_on_hosts
from gradwire.experiments.ranks.launchers import lab_here
from gradwire.experiments.sites_plan import Wan, round_plan
from gradwire.hooks.internet.server import Server

SITES, PORT, UP, DOWN, MBIT = 4, 29500, 110, 500, 1e6 / 8
PAUSE, FIRST = 0.3, 3  # seconds; rounds that do not count, in which connections begin


def site(rank: int, spec: str, side: int, rounds: int) -> list[float]:
    """Train a square matrix at one site, and return the seconds from the start of each round to its end."""
    host = os.environ["MASTER_ADDR"]
    server = Server(host, PORT) if rank == 0 else None
    at = gradwire.Rendezvous(f"{host}:{PORT}", SITES, name=f"site {rank}")
    model = nn.Linear(side, side, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = gradwire.LocalSteps(model, optimizer, every=1, fragments=1, overlap=False, compressor=spec, at=at)
    model(torch.ones(1, side)).sum().backward()
    ends = []
    for _ in range(FIRST + rounds):
        time.sleep(PAUSE)
        optimizer.step()
        ends.append(time.perf_counter())
    local.finish()
    if server is not None:
        time.sleep(1.0)  # the other sites still tell it of their end
        server.close()
    return [later - earlier - PAUSE for earlier, later in pairwise(ends[FIRST - 1 :])]


def rows_of(options: argparse.Namespace) -> None:
    """Train each case on a host of the lab; host 0 prints the first quartile of its rounds: other work only adds seconds."""
    (delay,), rank = options.delays, int(os.environ["RANK"])
    wan = Wan(SITES, UP * MBIT, DOWN * MBIT, 4 * delay / 1000)
    for side, spec in product(options.sides, options.compressors):
        planned = round_plan(gradwire.compressor(spec), {"weight": torch.empty(side, side)}, wan)
        quartile = statistics.quantiles(site(rank, spec, side, options.rounds), n=4)[0]
        if rank == 0:
            print(f"| `{spec}` | {side**2:,} | {4 * delay} ms | {quartile:.2f} | {planned.seconds:.2f} |", flush=True)


def main() -> None:
    """Run a lab for each delay."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--delays", type=int, nargs="+", default=[0, 15, 30], help="milliseconds, a quarter of a round trip"
    )
    parser.add_argument("--sides", type=int, nargs="+", default=[4, 1024], help="rows of the square matrix")
    parser.add_argument("--compressors", nargs="+", default=["none", "int4"])
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is at least 2, for quartiles")
    if lab_here() is not None:
        return rows_of(options)
    print("| compressor | parameters | round trip | round, s | planned |\n|---|---|---|---|---|", flush=True)
    for delay in options.delays:
        lab = NetlabConfig(SITES, f"{UP}mbit", f"{DOWN}mbit", f"{delay}ms")
        if code := run_on_hosts(lab, [sys.executable, __file__, *sys.argv[1:], "--delays", str(delay)]):
            sys.exit(code)


if __name__ == "__main__":
    main()
