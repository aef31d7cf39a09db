"""Where the processor's time of a step goes, by shared library: cases turn by turn in one run, sampled by Linux's perf.

On one machine, with perf installed and allowed to sample:

    python step_profile.py torch:none@25 gradwire:none@25 --ranks 2 --rounds 6 --steps 12

Cases are those of step_time.py. The figures are milliseconds a step and rank, of all threads, kernel included.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import step_time
import torch
import torch.distributed as dist
from driver import parser_of
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FREQUENCY = 4000  # samples a second and processor
SAMPLE = re.compile(r"(?P<pid>\d+)/\d+\s+(?P<seconds>[\d.]+):\s+[0-9a-f]+\s.*\((?P<library>[^()]*)\)$")


class Timed(step_time.Case):
    """A case that notes when its measured steps began and ended, by the clock that perf is told to use."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.spans: list[tuple[float, float]] = []

    def step(self, tokens: torch.Tensor) -> None:
        """One step."""
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        super().step(tokens)
        if len(self.rounds[-1]) > step_time.WARMUP_STEPS:
            self.spans.append((began, time.clock_gettime(time.CLOCK_MONOTONIC)))


def run_rank(arguments: argparse.Namespace) -> None:
    """Play the rounds on one rank and write {"pid", "spans": {case: [(begin, end)]}}."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = [Timed(name, *step_time.MODELS[arguments.model]) for name in arguments.cases]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for played in range(arguments.rounds):
        step_time.play_round(cases[::-1] if played % 2 else cases, arguments.steps, generator)
    told = {"pid": os.getpid(), "spans": {case.name: case.spans for case in cases}}
    (arguments.folder / f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def record(arguments: argparse.Namespace) -> None:
    """Run the ranks under perf; what it prints of its samples goes into the folder."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(arguments.ranks)]
    samples = str(arguments.folder / "perf.data")
    perf = ["perf", "record", "-q", "-k", "CLOCK_MONOTONIC", "-e", "cpu-clock", "-F", str(FREQUENCY), "-o", samples]
    subprocess.run([*perf, *torchrun, *sys.argv, "--folder", str(arguments.folder)], check=True)
    with (arguments.folder / "samples.txt").open("w") as file:
        shown = ["perf", "script", "-i", samples, "-F", "pid,tid,time,ip,sym,dso"]
        subprocess.run(shown, check=True, stdout=file, stderr=subprocess.DEVNULL)


def milliseconds(folder: Path) -> dict[str, Counter]:
    """{case: {library: milliseconds a step and rank}}."""
    ranks = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    steps = Counter({name: sum(len(rank["spans"][name]) for rank in ranks) for name in ranks[0]["spans"]})
    spans = {
        rank["pid"]: sorted((begin, end, name) for name, each in rank["spans"].items() for begin, end in each)
        for rank in ranks
    }
    counts: dict[str, Counter] = {name: Counter() for name in steps}
    for line in (folder / "samples.txt").open():
        if (sample := SAMPLE.search(line)) is None or int(sample["pid"]) not in spans:
            continue
        mine, seconds = spans[int(sample["pid"])], float(sample["seconds"])
        place = bisect_right(mine, (seconds, float("inf"), "")) - 1
        if place >= 0 and seconds <= mine[place][1]:
            counts[mine[place][2]][Path(sample["library"]).name] += 1
    return {
        name: Counter({library: 1000 / FREQUENCY * count / steps[name] for library, count in counts[name].items()})
        for name in counts
    }


def main() -> None:
    """Record and show, or be one of the ranks."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="+", metavar="WHAT@MEGABYTES")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each case in a round")
    parser.add_argument("--rounds", type=int, default=6, help="how often all cases are built anew")
    parser.add_argument("--model", choices=step_time.MODELS, default="transformer")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        run_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = Path(folder)
        record(arguments)
        found = milliseconds(arguments.folder)
    table = Table(title=f"milliseconds a step and rank, {arguments.ranks} ranks")
    for heading in ("library", *found):
        table.add_column(heading, justify="left" if heading == "library" else "right")
    libraries = sum(found.values(), Counter())
    for library, _ in libraries.most_common(8):
        table.add_row(escape(library), *(f"{found[name][library]:.2f}" for name in found))
    table.add_row("all", *(f"{found[name].total():.2f}" for name in found))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
