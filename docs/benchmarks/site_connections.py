"""Seconds of an all-gather between two sites: over gradwire's authenticated connections, and over Gloo.

    python site_connections.py --megabytes 1 16 64

Two processes on the loopback address send each other a tensor. Each size is sent `--times` times in turns. The table has
medians.
"""

import argparse
import multiprocessing
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gradwire import Rendezvous
from gradwire.compress.protocol.requests import AllGather
from gradwire.hooks.internet.meeting import Meeting
from gradwire.hooks.internet.server import keep
from gradwire.hooks.local_sgd.sites import GroupMeeting

SECRET = "a secret of this benchmark alone"


def site(rank: int, port: int, options: argparse.Namespace, answers: Any) -> None:
    """Gather each size in turns over both kinds of connections."""
    torch.set_num_threads(1)
    at = Rendezvous(f"127.0.0.1:{port}", 2, secret=SECRET)
    at.join("alike")
    ours = at.meet()
    store = dist.TCPStore("127.0.0.1", options.store, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    meetings: dict[str, Meeting] = {"ours": ours, "Gloo": GroupMeeting(group, ours.timeout)}
    for size in options.megabytes:
        tensor = torch.full((size << 18,), float(rank))
        found: dict[str, list[float]] = {name: [] for name in meetings}
        for _ in range(options.times):
            for name, meeting in meetings.items():
                began = time.perf_counter()
                gathered = meeting.start(AllGather(tensor), 0).wait(meeting.timeout)
                found[name].append(time.perf_counter() - began)
                assert gathered.mean().item() == 0.5
        answers.put((rank, size, {name: statistics.median(each) for name, each in found.items()}))
    at.close()


def main() -> None:
    """Run, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 16, 64], help="MiB that each site sends")
    parser.add_argument("--times", type=int, default=7, help="rounds of each size")
    options = parser.parse_args()
    context, server = multiprocessing.get_context("spawn"), keep(secret=SECRET)
    free = keep()
    options.store = free.port
    free.close()
    answers = context.Queue()
    processes = [context.Process(target=site, args=(rank, server.port, options, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [answers.get(timeout=300) for _ in range(2 * len(options.megabytes))]
    for process in processes:
        process.join()
    table = Table("MiB", "ours, s", "Gloo, s", "ours, Gbit/s")
    for rank, size, seconds in sorted(found, key=lambda each: each[:2]):
        if rank == 0:
            rate = size * 8 * 1.048576e6 / seconds["ours"] / 1e9
            table.add_row(str(size), f"{seconds['ours']:.4f}", f"{seconds['Gloo']:.4f}", f"{rate:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
