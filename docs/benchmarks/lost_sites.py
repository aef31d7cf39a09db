"""Four sites by local steps, undisturbed, and with one killed, one stopped for a minute and one that joins late.

    python lost_sites.py --json lost-sites.json

Every site is a process that trains a byte GPT on its own text and meets the others in a store. A step takes at least
`--pace` seconds. In the disturbed run one site is killed with SIGKILL after a tenth of the rounds; another is stopped with
SIGSTOP after two tenths for `--stopped` seconds, behind which a new one starts: rounds and pace have to leave it the time.
All runs take place beside each other and train until the same round.
Told are the longest that a step of an undisturbed site took, the held-out loss at the end, and whether all sites end with
the same parameters.
"""

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from driver import parser_of, write_results
from rich.console import Console
from rich.table import Table

from gradwire import LocalSteps, Rendezvous
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.evaluation import digest_of, evaluation_of, held_out_sums
from gradwire.experiments.workloads.models import ModelConfig, build_model
from gradwire.experiments.workloads.training import loss_of
from gradwire.hooks.internet.server import Server

MODEL = ModelConfig("gpt", width=64, layers=2, heads=2, context=64)
SITES, BATCH, EVERY, FRAGMENTS, RATE = 4, 4, 16, 4, 3e-3
PLAIN = "sgd:lr=1,momentum=0"
CPU = torch.device("cpu")
KILLED, STOPPED, LATE = 3, 2, SITES
PATIENCE = 600.0  # seconds for a run

Answer = dict[str, Any]


def site(place: int, address: str, options: argparse.Namespace, seed: int, rounds: Any, answers: Any) -> None:
    """Train one site to the last round; tell its rounds on the way and its answer at the end."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dataset = load_dataset(DataConfig("text"), MODEL)
    model = build_model(MODEL, dataset)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    limit = timedelta(seconds=options.limit)
    at = Rendezvous(address, SITES, name=f"site {place}", limit=limit, prefix=str(seed))
    local = LocalSteps(model, optimizer, every=EVERY, fragments=FRAGMENTS, outer=PLAIN, at=at)
    longest, first = 0.0, local.round
    for inputs, targets in dataset.train_batches(BATCH, seed=seed, rank=place % SITES, world_size=SITES):
        loss_of(model, inputs, targets).backward()
        time.sleep(options.pace)
        began = time.perf_counter()
        optimizer.step()
        longest = max(longest, time.perf_counter() - began)
        optimizer.zero_grad()
        rounds[place] = local.round
        if local.round >= options.rounds:
            break
    local.finish()
    loss = evaluation_of(held_out_sums(model, dataset.evaluation_batches(16, 64), CPU)).loss
    missed = sum(stats.replaced for stats in local.history[1:])
    answers.put(
        {"site": place, "steps": local.steps, "first_round": first, "longest_seconds": longest, "loss": loss}
        | {"last_round": local.round, "replaced": missed, "digest": digest_of(model)}
    )


def run(options: argparse.Namespace, seed: int, *, disturbed: bool) -> list[Answer]:
    """What the sites answer that are there at the end."""
    context, store = multiprocessing.get_context("spawn"), Server()
    rounds, answers = context.Array("i", SITES + 1, lock=False), context.Queue()

    def start(place: int) -> BaseProcess:
        given = (place, f"127.0.0.1:{store.port}", options, seed, rounds, answers)
        process = context.Process(target=site, args=given, daemon=True)
        process.start()
        return process

    processes = [start(place) for place in range(SITES)]
    try:
        if disturbed:
            processes.append(disturb(processes, rounds, options, start))
        return sorted((answers.get(timeout=PATIENCE) for _ in range(SITES)), key=lambda answer: answer["site"])
    finally:
        for process in processes:
            process.kill()
            process.join()


def disturb(
    processes: list[BaseProcess], rounds: Any, options: argparse.Namespace, start: Callable[[int], BaseProcess]
) -> BaseProcess:
    """Kill one site, stop another for a while, and start a new one, which is returned."""
    wait_for(rounds, options.rounds // 10)
    send(processes[KILLED], signal.SIGKILL)
    wait_for(rounds, 2 * options.rounds // 10)
    send(processes[STOPPED], signal.SIGSTOP)
    time.sleep(options.stopped)
    send(processes[STOPPED], signal.SIGCONT)
    return start(LATE)


def wait_for(rounds: Any, number: int) -> None:
    """Until the first site has had so many rounds."""
    deadline = time.monotonic() + PATIENCE
    while rounds[0] < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"round {number} has not come within {PATIENCE:g} s")
        time.sleep(0.05)


def send(process: BaseProcess, number: signal.Signals) -> None:
    """A signal to a site."""
    assert process.pid is not None
    os.kill(process.pid, number)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="at which training ends")
    parser.add_argument("--pace", type=float, default=0.4, help="seconds that a step takes beside its computation")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds of a round")
    parser.add_argument("--stopped", type=float, default=60.0, help="seconds that a site is stopped")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the undisturbed runs")
    parser.add_argument("--json", type=Path, help="file for the answers")
    return parser.parse_args()


def main() -> None:
    """Run, and tell."""
    options = parsed()
    runs = [(f"undisturbed, seed {seed}", seed, False) for seed in options.seeds]
    runs.append((f"disturbed, seed {options.seeds[0]}", options.seeds[0], True))
    with ThreadPoolExecutor(len(runs)) as pool:
        begun = {name: pool.submit(run, options, seed, disturbed=disturbed) for name, seed, disturbed in runs}
        told = {name: each.result() for name, each in begun.items()}
    names = ("site", "steps", "first_round", "last_round", "replaced", "longest_seconds", "loss", "digest")
    table = Table("run", *names)
    for name, answers in told.items():
        for answer in answers:
            short = {"digest": answer["digest"][:8], "loss": f"{answer['loss']:.4f}"}
            shown = {**answer, **short, "longest_seconds": f"{answer['longest_seconds']:.1f}"}
            table.add_row(name, *(str(shown[each]) for each in names))
    Console().print(table)
    write_results(options.json, {"options": {**vars(options), "json": None}, "runs": told})


if __name__ == "__main__":
    main()
