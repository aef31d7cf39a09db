"""`gradwire try`: the user's own training script, once with each compressor."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ..compress import compressor
from ..hooks.report_loss import COMPRESSOR, FOLDER, PLACE, STEPS
from .advice.candidates import uncertainty
from .advice.recommendation import ON_ONE_HOST
from .advice.rule import LEAST, Rule, few, taken, wide
from .ranks.child import CommandFailure, run_to_end
from .ranks.stopping import sigterm_interrupts
from .results.files import check_file, figures_document, prepared_folder, write_json
from .results.rows import milliseconds
from .results.verdict import ONE_SEED
from .workloads.sharding import TORCH, check_payloads

HEADINGS = ("step time", "speed-up", "sent per step", "fewer bytes", "training loss")
LAST = 10  # the loss is the mean of the last tenth of the steps


@dataclass(frozen=True)
class TryConfig:
    """Run a training script once with each compressor, and compare loss, step time and bytes sent."""

    compressors: list[str] = field(default_factory=lambda: ["none", "bf16", "int8", "int4"])
    """compressors to compare, separated by commas; of FSDP2 also WEIGHTS/GRADIENTS, such as int8/int4, and torch for the
    script without gradwire's attach. Distances and speed-ups are to the first one"""
    steps: int = 100
    """number of steps for each compressor; then report_loss ends the script"""
    limit: float = 3600.0
    """longest time that one compressor may take, in seconds"""
    out: str | None = None
    """folder for the losses and the output of the script; runs/TIME if not given"""
    json: str | None = None
    """write the table to this file"""
    command: list[str] = field(default_factory=list)
    """command that trains on all ranks of this host, after --; on several hosts, start gradwire try on each"""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps is at least 2, got {self.steps}")
        if not self.limit > 0:
            raise ValueError(f"limit is above 0 seconds, got {self.limit}")
        if not self.compressors:
            raise ValueError("compressors is empty: name at least one, such as none,bf16,int4")
        for spec in self.compressors:
            if spec != TORCH:
                check_payloads(spec) if "/" in spec else compressor(spec)
        check_file("json", self.json)


@dataclass(frozen=True)
class Tried:
    """The run of one compressor.

    `loss`: the mean over ranks and the last tenth of the steps; `first_loss`: over ranks, of the first step.
    `step_seconds`: rank 0's median without the first fifth.
    `on_cpus_of_one_host`: all ranks ran there.
    """

    compressor: str
    steps: int
    loss: float
    first_loss: float
    step_seconds: float
    sent_bytes_per_step: float | None
    compression_ratio: float | None
    on_cpus_of_one_host: bool = False


def try_command(config: TryConfig) -> int:
    """Run the script with each compressor and show the table; the exit code: 1 if a run failed."""
    if not config.command:
        raise ValueError(
            "give the command of your script behind --: gradwire try -- torchrun --nproc-per-node 2 train.py"
        )
    console, rows, failed = Console(), list[Tried](), False
    out = prepared_folder(config.out or time.strftime("runs/%Y-%m-%d-%H%M%S"))
    with sigterm_interrupts():
        for number, spec in enumerate(config.compressors):
            console.print(
                f"{spec}: {config.steps} steps of {shlex.join(config.command)}", markup=False, highlight=False
            )
            try:
                rows.append(_tried(spec, config, out / f"{number}-{re.sub(r'[^a-z0-9]+', '-', spec)}"))
            except CommandFailure as error:
                failed = True
                console.print(f"failed with {spec}: {error}", style="red", markup=False, highlight=False)
                if number == 0 and len(config.compressors) > 1:
                    console.print("The others are compared with it, so they were not tried.")
                    break
    if rows:
        console.print(_table(rows))
        told = f"Losses: one run of {rows[0].steps} steps for each compressor. {ONE_SEED} {uncertainty()}"
        console.print(told, soft_wrap=True)
        console.print(
            "The runs came one after the other: step times hold if nothing else ran on the hosts.", soft_wrap=True
        )
    console.print(f"losses and output of the script: {out}", markup=False, highlight=False, soft_wrap=True)
    if len(rows) > 1:
        console.print(_verdict(rows, config.steps), markup=False, highlight=False, soft_wrap=True)
    if config.json:
        write_json(figures_document("try", config, [asdict(row) for row in rows]), config.json)
    return int(failed)


def _tried(spec: str, config: TryConfig, folder: Path) -> Tried:
    """Run the script with one compressor. Raises CommandFailure."""
    folder.mkdir(exist_ok=True)
    for old in (*folder.glob("rank-*.jsonl"), folder / PLACE):
        old.unlink(missing_ok=True)
    told = {COMPRESSOR: spec, FOLDER: str(folder.resolve()), STEPS: str(config.steps)}
    shown = f"{COMPRESSOR}={shlex.quote(spec)} {shlex.join(config.command)}"
    try:
        run_to_end(shown, config.command, config.limit, folder / "output.txt", {**os.environ, **told})
    except OSError as error:
        raise CommandFailure(f"{config.command[0]} cannot be run: {error.strerror}") from error
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("rank-*.jsonl"))
    ]
    if not ranks or min(map(len, ranks)) < 2:
        raise CommandFailure(
            f"{shown} reported no losses. Call gradwire.report_loss(loss, handle) on all ranks in every step"
        )
    place = json.loads((folder / PLACE).read_text()) if (folder / PLACE).exists() else {}
    return _measured(spec, ranks, on_cpus_of_one_host=place == {"hosts": 1, "on_cpus": True})


def _measured(spec: str, ranks: Sequence[Sequence[dict[str, float]]], *, on_cpus_of_one_host: bool) -> Tried:
    """Return what the lines of all ranks say."""
    steps = min(map(len, ranks))
    last = max(1, steps // LAST)
    seconds = [after["at"] - before["at"] for before, after in pairwise(ranks[0])]
    return Tried(
        spec,
        steps,
        statistics.fmean(line["loss"] for lines in ranks for line in lines[steps - last : steps]),
        statistics.fmean(lines[0]["loss"] for lines in ranks),
        statistics.median(seconds[len(seconds) // 5 :]),
        ranks[0][-1].get("sent_bytes"),
        ranks[0][-1].get("ratio"),
        on_cpus_of_one_host,
    )


def _verdict(rows: Sequence[Tried], asked: int) -> str:
    """Return which compressor to take of those that keep the loss, 8 bits or more first, and the next step.

    `asked`: steps, after the last of which ranks report where they run.
    """
    rule, first = Rule(), rows[0]
    if unlike := _unlike(rows):
        return unlike
    if first.steps < asked:
        return f"No verdict: the script ended after {first.steps} of {asked} steps. Take --steps {first.steps} at most."
    if first.on_cpus_of_one_host:
        return ON_ONE_HOST
    most = first.loss + rule.tolerance * abs(first.loss)
    ordered = sorted((row for row in rows[1:] if row.loss <= most), key=lambda row: not wide(row.compressor))
    steps = {row.compressor: first.step_seconds / row.step_seconds for row in ordered}
    what = f"of the step of {first.compressor}, at a training loss at most {100 * rule.tolerance:.0f} % above"
    worth = rule.worth(steps)
    place = taken(worth, few=few(row.compressor for row in rows[1:]))
    if place is None:
        kept = "your script" if first.compressor in ("none", TORCH) else first.compressor
        bits = " of 8 bits or more" * bool(worth)
        words, base, beyond = f"Keep {kept}: no other compressor{bits} saves {LEAST} or more {what}.", 1.0, worth
    else:
        best, *beyond = worth[place:]
        words, base = f"Take {best}: it saves {100 * (1 - 1 / steps[best]):.0f} % {what}.", steps[best]
    for spec in beyond[:1]:
        words += f" Next step: {spec} saves {100 * (1 - base / steps[spec]):.0f} % of that, and can cost loss."
    return words


def _unlike(rows: Sequence[Tried]) -> str:
    """Return which run did not begin as the first one did, such as from a checkpoint; nothing where all did."""
    first = rows[0]
    for row in rows[1:]:
        near = abs(row.first_loss - first.first_loss) <= Rule.tolerance * abs(first.first_loss)
        if row.steps != first.steps or not near:
            return (
                f"No verdict: the runs are not alike. {first.compressor} ran {first.steps} steps from a loss of "
                f"{first.first_loss:.4f}, and {row.compressor} {row.steps} from {row.first_loss:.4f}. Seed the model and "
                "the data, and let no run find the checkpoint of the one before: -- sh -c 'rm -f checkpoint.pt; torchrun "
                "...'"
            )
    return ""


def _table(rows: Sequence[Tried]) -> Table:
    shown, first = Table(), rows[0]
    shown.add_column("compressor", no_wrap=True)
    for heading in (*HEADINGS, f"above {first.compressor}"):
        shown.add_column(heading, justify="right")
    for row in rows:
        above = row.loss / first.loss - 1 if first.loss else math.nan
        shown.add_row(
            row.compressor,
            milliseconds(row.step_seconds),
            f"{first.step_seconds / row.step_seconds:.2f}x",
            "-" if row.sent_bytes_per_step is None else decimal(round(row.sent_bytes_per_step)),
            "-" if row.compression_ratio is None else f"{row.compression_ratio:.1f}x",
            f"{row.loss:.4f}",
            "" if row is first else f"{above:+.1%}",
        )
    return shown
