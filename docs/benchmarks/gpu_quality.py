"""Validation losses with compression at the size of GPT-2 small: simulated ranks on one GPU.

    python gpu_quality.py none int4 powersgd:rank=8,payload=int8 --seconds 180 --folder quality --json quality.json

The model is a GPT on bytes with 128 M parameters, under autocast to bf16. The text is the Python installation's own sources
and documents, split into training and validation by file. Each simulated rank has batches of its own; gradwire's simulator
averages the ranks' gradients in DDP's buckets. All compressors begin with the same weights and take the same batches.
`--local-every 8` trains by local SGD instead: each rank has a model of its own, and differences are averaged every 8 steps.

A second call with the same folder skips the finished runs and continues an interrupted run from its checkpoint. The folder
keeps the number of steps that fitted into `--seconds`: take a new folder for another budget.
"""

import argparse
import copy
import json
import statistics
import sysconfig
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from math import cos, pi
from pathlib import Path

import torch
from bytes_gpt import SIZES, Gpt, Text, loss_of, text_of, validation_loss
from driver import parser_of, write_results
from torch import nn

import gradwire
from gradwire import kernels
from gradwire.compress import compressor, tuned
from gradwire.experiments.bucket_plan import ratio
from gradwire.experiments.workloads.simulated import SimulatedRanks
from gradwire.hooks.local_sgd.outer import outer

DEFAULTS = ("none", "int4", "powersgd:rank=8,payload=int8", "onebit", "powersgd:rank=4,payload=int4")
TRIAL, WARM, MARGIN = 20, 10, 0.93  # steps of a trial, those before its clock starts; share of a budget that is planned


@dataclass(frozen=True)
class Run:
    """All that decides a run's result."""

    compressor: str
    seed: int
    optimizer: str
    steps: int
    size: str
    ranks: int
    batch: int
    lr: float
    bucket_mb: float | None
    text: dict[str, int]
    local_every: int = 0  # steps between averages of local SGD; 0: gradients are averaged at every step
    outer: str = ""


def optimizers_of(model: Gpt, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """Return AdamW; with `muon`, Muon for the blocks' matrices before it. Vectors have no weight decay."""
    matrices = [p for p in model.blocks.parameters() if p.dim() > 1] if name == "muon" else []
    others = [p for p in model.parameters() if all(p is not each for each in matrices)]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr, (0.9, 0.95), fused=others[0].is_cuda)
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), adamw]


class Training:
    """A model, its simulated ranks and their batches."""

    def __init__(self, run: Run, text: Text) -> None:
        device = text.train.device
        torch.manual_seed(run.seed)
        with device:
            self.model = Gpt(run.size)
        self.run, self.text, self.done = run, text, 0
        self.optimizers = optimizers_of(self.model, run.optimizer, run.lr)
        built = compressor(tuned(run.compressor, self.optimizers[0]))
        self.ranks = SimulatedRanks(self.model, built, run.ranks, run.bucket_mb, device)
        limit = len(text.train) - self.model.length
        batches = torch.Generator().manual_seed(run.seed)
        self.starts = torch.randint(limit, (run.steps, run.ranks, run.batch, 1), generator=batches).to(device)
        self.window = torch.arange(self.model.length + 1, device=device)

    def step(self) -> None:
        """Run forward and backward once per rank, average the gradients, and update the model."""
        for rank in range(self.run.ranks):
            self.ranks.begin(rank)
            self._backward(self.model, rank)
        self.ranks.average()
        self._update(self.model, self.optimizers)
        self.done += 1

    def _backward(self, model: Gpt, rank: int) -> None:
        tokens = self.text.train[self.starts[self.done, rank] + self.window]
        loss_of(model, tokens.long()).backward()

    def _update(self, model: Gpt, optimizers: list[torch.optim.Optimizer]) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.run.lr * self._schedule()
            optimizer.step()

    def _schedule(self) -> float:
        """Return the factor of the learning rate: a linear warm-up, then a cosine to a tenth."""
        warm = min(100, max(1, self.run.steps // 5))
        part = max(0, self.done - warm) / max(1, self.run.steps - warm)
        return min(1.0, (self.done + 1) / warm) * (0.55 + 0.45 * cos(pi * part))

    def state(self) -> dict:
        """Return what a checkpoint holds of the training."""
        return {
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "ranks": self.ranks.state(),
        }

    def load(self, state: dict) -> None:
        """Continue from a checkpoint."""
        self.done = state["done"]
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.ranks.load(state["ranks"], self.done)


class LocalTraining(Training):
    """Local SGD. `model` is the common one: an outer optimizer moves it by the average of all ranks' differences to it."""

    def __init__(self, run: Run, text: Text) -> None:
        super().__init__(run, text)
        self.ranks = SimulatedRanks(self.model, compressor(run.compressor), run.ranks, run.bucket_mb, text.train.device)
        self.models = [copy.deepcopy(self.model) for _ in range(run.ranks)]
        self.own = [optimizers_of(model, run.optimizer, run.lr) for model in self.models]
        how = outer(run.outer)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), how.lr, how.momentum, nesterov=how.nesterov)]

    def step(self) -> None:
        """Update each rank's model with its own gradients; every few steps and after the last, average the differences."""
        for rank, (model, optimizers) in enumerate(zip(self.models, self.own, strict=True)):
            self._backward(model, rank)
            self._update(model, optimizers)
            model.zero_grad()
        self.done += 1
        if self.done % self.run.local_every == 0 or self.done == self.run.steps:
            self._synchronize()

    @torch.no_grad()
    def _synchronize(self) -> None:
        for rank, model in enumerate(self.models):
            self.ranks.begin(rank)
            for common, local in zip(self.model.parameters(), model.parameters(), strict=True):
                common.grad.copy_(common - local)
        self.ranks.average()
        self.optimizers[0].step()
        for model in self.models:
            for common, local in zip(self.model.parameters(), model.parameters(), strict=True):
                local.copy_(common)

    def state(self) -> dict:
        """Return what a checkpoint holds of the training."""
        models = [model.state_dict() for model in self.models]
        own = [[optimizer.state_dict() for optimizer in optimizers] for optimizers in self.own]
        return {**super().state(), "models": models, "own": own}

    def load(self, state: dict) -> None:
        """Continue from a checkpoint."""
        super().load(state)
        for model, optimizers, saved, own in zip(self.models, self.own, state["models"], state["own"], strict=True):
            model.load_state_dict(saved)
            for optimizer, each in zip(optimizers, own, strict=True):
                optimizer.load_state_dict(each)


def training_of(run: Run, text: Text) -> Training:
    """Return a run's training, at its start."""
    return (LocalTraining if run.local_every else Training)(run, text)


def now(device: torch.device) -> float:
    """Return the time once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trained(run: Run, text: Text, every: int, checkpoint: Path | None) -> dict:
    """Train, from the checkpoint if it is of this run; return the run's row."""
    device = text.train.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training, losses, seconds = training_of(run, text), {}, []
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        if saved["run"] == asdict(run):
            training.load(saved["training"])
            losses, seconds = saved["losses"], saved["seconds"]
        del saved
    while training.done < run.steps:
        steps, start = min(every - training.done % every, run.steps - training.done), now(device)
        for _ in range(steps):
            training.step()
        seconds.append((now(device) - start) / steps)
        losses[str(training.done)] = validation_loss(training.model, text.validation)
        print(f"{run.compressor}: step {training.done} of {run.steps}, loss {losses[str(training.done)]:.4f}, "
              f"{1000 * seconds[-1]:.0f} ms per step", flush=True)  # fmt: skip
        if checkpoint and training.done < run.steps:
            parts = {"run": asdict(run), "losses": losses, "seconds": seconds}
            torch.save({**parts, "training": training.state()}, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    ranks = training.ranks
    mean = replace(ranks.last, sent_bytes=ranks.total.sent_bytes / run.steps)
    return {
        **asdict(run),
        "parameters": ranks.elements,
        "loss": losses[str(run.steps)],
        "losses": losses,
        "sent_bytes_per_step": mean.sent_bytes,
        "ratio": ratio(4 * ranks.elements, mean, run.ranks),
        "step_seconds": statistics.median(seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }


def affordable_steps(runs: list[Run], text: Text, every: int, deadline: float) -> int:
    """Return how many steps every run can have until the deadline, by a trial of each compressor; a multiple of 50."""
    device, fixed, per_step = text.train.device, 0.0, 0.0
    tried = [run for run in runs if run.seed == runs[0].seed]
    for run in tried:
        times = [now(device)]
        training = training_of(replace(run, steps=TRIAL), text)
        times.append(now(device))
        for steps in (WARM, TRIAL - WARM):
            for _ in range(steps):
                training.step()
            times.append(now(device))
        validation_loss(training.model, text.validation)
        times.append(now(device))
        build, _, step, validation = (end - start for start, end in pairwise(times))
        del training  # before the next one takes its memory
        fixed += build + validation
        per_step += step / (TRIAL - WARM) + validation / every
    seeds = len(runs) / len(tried)
    left = MARGIN * (deadline - time.monotonic()) - seeds * fixed
    return max(50, int(left / (seeds * per_step)) // 50 * 50)


def compared(rows: list[dict]) -> list[dict]:
    """Add how far each loss is above that of `none` with the same seed, at every step, as a share of it."""
    uncompressed = {row["seed"]: row["loss"] for row in rows if row["compressor"] == "none" and not row["local_every"]}
    over = [row["loss"] / uncompressed[row["seed"]] - 1 if row["seed"] in uncompressed else None for row in rows]
    return [{**row, "over_none": each} for row, each in zip(rows, over, strict=True)]


def show(rows: list[dict], title: str) -> None:
    """Print a table, or a line of JSON for each run where rich is not installed."""
    if find_spec("rich") is None:
        print(title, *map(json.dumps, rows), sep="\n")
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for heading in ("compressor", "seed", "loss", "to none", "sent per step", "fewer bytes", "step time", "memory"):
        shown.add_column(heading, justify="left" if heading == "compressor" else "right")
    for row in rows:
        shown.add_row(
            row["compressor"],
            str(row["seed"]),
            f"{row['loss']:.4f}",
            "" if row["over_none"] is None else f"{row['over_none']:+.2%}",
            f"{row['sent_bytes_per_step'] / 1e6:,.3f} MB",
            f"{row['ratio']:,.1f}x",
            f"{1000 * row['step_seconds']:.0f} ms",
            f"{row['peak_memory_bytes'] / 1e9:.1f} GB" if row["peak_memory_bytes"] else "",
        )
    Console(width=130).print(shown)


def options(given: list[str] | None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = parser_of(__doc__)
    parser.add_argument("compressors", nargs="*", default=DEFAULTS)
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="a run of each compressor for each of these")
    parser.add_argument("--steps", type=int, help="of each run; by default as many as --seconds allows")
    parser.add_argument("--seconds", type=float, default=420.0, help="for all runs together")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--bucket-mb", type=float, help="by default DDP's: 1 MiB, then 25")
    parser.add_argument("--size", choices=SIZES, default="gpt2")
    parser.add_argument("--local-every", type=int, default=0, help="steps between averages of local SGD")
    parser.add_argument("--outer", default="", help="optimizer of local SGD's averages; average by default")
    parser.add_argument("--every", type=int, default=100, help="steps between validations, and between checkpoints")
    parser.add_argument("--checkpoints", action=argparse.BooleanOptionalAction, default=True, help="GBs each")
    parser.add_argument("--text", type=Path, nargs="+", help="folders of text; by default this Python's own")
    parser.add_argument("--megabytes", type=float, default=60.0, help="of text for training, at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="keeps finished runs and a checkpoint, to continue from")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args(given)
    if parsed.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        parser.error(f"torch {torch.__version__} has no Muon, which came with 2.9: take --optimizer adamw")
    if parsed.outer and not parsed.local_every:
        parser.error("--outer needs --local-every")
    if parsed.local_every and not parsed.outer:
        parsed.outer = "average"
    return parsed


def environment(device: torch.device) -> dict:
    """Return the versions and the device behind the figures."""
    return {
        "torch": torch.__version__,
        "gradwire": gradwire.__version__,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "backends": [each.name for each in kernels.backends() if each.available],
    }


def main(given: list[str] | None = None) -> None:
    """Train with each compressor, one after the other."""
    began, asked = time.monotonic(), options(given)
    device, every = torch.device(asked.device), asked.every
    roots = asked.text or [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    text = text_of(roots, int(1e6 * asked.megabytes), SIZES[asked.size][3], device)
    print(f"text: {text.about}, read in {time.monotonic() - began:.1f} s", flush=True)
    names = ("optimizer", "size", "ranks", "batch", "lr", "bucket_mb", "local_every", "outer")
    same = {"steps": asked.steps or 0, "text": text.about, **{name: getattr(asked, name) for name in names}}
    runs = [Run(name, seed, **same) for seed in asked.seed for name in asked.compressors]
    kept = checkpoint = steps = None
    if asked.folder:
        asked.folder.mkdir(parents=True, exist_ok=True)
        kept, checkpoint, steps = (asked.folder / name for name in ("runs.jsonl", "checkpoint.pt", "steps.txt"))
    if not asked.steps:
        known = steps is not None and steps.exists()
        count = int(steps.read_text()) if known else affordable_steps(runs, text, every, began + asked.seconds)
        runs = [replace(run, steps=count) for run in runs]
        if steps:
            steps.write_text(f"{count}\n")
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    rows = []
    for run in runs:
        row = next((each for each in done if each.items() >= asdict(run).items()), None)
        if row is None:
            row = trained(run, text, every, checkpoint if asked.checkpoints else None)
            if kept:
                with kept.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                checkpoint.unlink(missing_ok=True)
        rows.append(row)
    rows = compared(rows)
    show(rows, f"{rows[0]['parameters']:,} parameters, {asked.ranks} ranks, {runs[0].steps} steps, {asked.optimizer}")
    seconds = time.monotonic() - began
    write_results(asked.json, {**environment(device), "text": text.about, "seconds": seconds, "runs": rows})


if __name__ == "__main__":
    main()
