"""Validation losses at a hundredth of the bytes: which changes of local SGD gain, and which do not.

    python docs/benchmarks/hundredfold.py docs/results/hundredfold/runs.json
    python docs/benchmarks/hundredfold.py docs/results/hundredfold/runs.json --ways "none, lr 0.004" --seeds 1 2
    python docs/benchmarks/hundredfold.py docs/results/hundredfold/runs.json --table

GPTs of 0.14 to 0.9 M parameters train on 5, 20 or 80 tokens per parameter, at four simulated sites that share one process.
Each site has an optimizer of its own, AdamW, or Muon for the blocks' matrices and AdamW for the rest. All ways read the
same sequences in the same steps. Runs that the file has are skipped. `--table` runs nothing: it writes ways.csv into the
file's folder, a line for each way, and draws losses of the smallest model by bytes there. `--above` runs nothing either: it
prints per cent of loss, with an interval over seeds.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from compressor_loss import MUON_LR, Task
from driver import parser_of
from few_bits import group_of
from finished_runs import FinishedRuns
from hundredfold_ways import FITTED, LR, MODELS, WAYS, Way
from muon_feedback import FittedInt2
from sparseloco import SparseLoCo
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from gradwire.compress import Layout, Ranks, Simulation, compressor, tuned
from gradwire.compress.algorithms.adapters import TwoShot
from gradwire.compress.feedback.error_feedback import ErrorFeedback
from gradwire.experiments.results.statistics import interval
from gradwire.experiments.sweep.config import Figure
from gradwire.experiments.sweep.picture import draw
from gradwire.experiments.workloads.data import Dataset, load_dataset
from gradwire.experiments.workloads.evaluation import evaluation_of, held_out_sums
from gradwire.experiments.workloads.models.build import ModelConfig
from gradwire.experiments.workloads.muon import Muon
from gradwire.experiments.workloads.training import initial_model
from gradwire.hooks.local_sgd.outer import outer

CPU = torch.device("cpu")
SITES = 4
BATCH, PARAMETERS = 4, 136_960  # sequences per site and step for so many parameters; in proportion for others
LENGTHS = 672, 2688, 10752  # steps: 5, 20 and 80 tokens per parameter
STEPS = LENGTHS[1]
WARMUP = 28  # a training's first part of so many parts, in which the learning rate grows
VALIDATION = 32, 64  # sequences of a batch, and batches
SEEDS = range(6)
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's, in torch's words
LEAST = 0.1  # of its own second moment, that a site keeps at least


class Sites:
    """The models of all sites in the rows of one tensor. A forward computes all of them at once."""

    def __init__(self, model: nn.Module, way: Way) -> None:
        named = sorted(model.named_parameters(), key=lambda pair: not is_matrix(*pair))  # the blocks' matrices first
        self.way, self.config, self.shapes = way, MODELS[way.size], {name: each.shape for name, each in named}
        self.sizes = [each.numel() for _, each in named]
        initial = torch.cat([each.detach().reshape(-1) for _, each in named])
        self.models = initial.repeat(SITES, 1).requires_grad_()
        self.others, *self.matrices = map(nn.Parameter, self._parts(self.models.detach()))
        self.adam = AdamW([self.others], way.lr, fused=self.others.is_contiguous())
        moments = {name: torch.zeros_like(self.others) for name in MOMENTS}
        self.adam.state[self.others] = {"step": torch.tensor(0.0), **moments}
        groups: Any = [group_of(each) for each in self.matrices]
        self.optimizers: list[Optimizer] = [self.adam, *([Muon(groups, MUON_LR)] if groups else [])]
        for group in groups:
            group["lr"] *= way.muon_lr / MUON_LR
        self.rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]

    @cached_property
    def layout(self) -> Layout:
        """The layout of one model."""
        return Layout(tuple(self.shapes), tuple(map(tuple, self.shapes.values())), torch.float32, CPU, Ranks(SITES))

    def named(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the parameters of rows: (rows, *shape) each."""
        parts = zip(self.shapes.items(), rows.split(self.sizes, 1), strict=True)
        return {name: part.view(len(rows), *shape) for (name, shape), part in parts}

    def _parts(self, rows: Tensor) -> list[Tensor]:
        """Return what AdamW has, and each site's matrices if Muon has them."""
        if self.way.optimizer == "adamw":
            return [rows]
        own = [each for name, each in self.named(rows).items() if is_matrix(name, each[0])]
        return [rows[:, sum(each[0].numel() for each in own) :], *(matrix for each in own for matrix in each)]

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradients of all sites' own losses, from tokens (sites, sequences, positions)."""
        values = logits(self.config, self.named(self.models), inputs)
        loss = functional.cross_entropy(values.flatten(0, -2), targets.flatten())
        (found,) = torch.autograd.grad(SITES * loss, self.models)
        return found

    def step(self, gradients: Tensor, factor: float) -> None:
        """Update all models at a part of the largest learning rates."""
        for parameter, gradient in zip((self.others, *self.matrices), self._parts(gradients), strict=True):
            parameter.grad = gradient
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            optimizer.step()


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix of the blocks."""
    return name.startswith("blocks.") and parameter.dim() > 1


def logits(config: ModelConfig, parameters: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Return what the GPT of gradwire's workloads does: (sites, sequences * positions, vocabulary)."""
    sites, _, positions = tokens.shape
    heads, width = config.heads, config.width

    def linear(values: Tensor, weight: str, bias: str) -> Tensor:
        return torch.baddbmm(parameters[bias].unsqueeze(1), values, parameters[weight].mT)

    def norm(values: Tensor, name: str) -> Tensor:
        weight, bias = (parameters[f"{name}.{each}"].unsqueeze(1) for each in ("weight", "bias"))
        return torch.addcmul(bias, functional.layer_norm(values, (width,)), weight)

    table = parameters["tokens.weight"]
    first = torch.arange(sites).view(-1, 1, 1) * table.shape[1]
    embedded = functional.embedding(tokens + first, table.flatten(0, 1)) + parameters["positions.weight"].unsqueeze(1)
    hidden = embedded.view(sites, -1, width)
    for layer in range(config.layers):
        name = f"blocks.layers.{layer}"
        joint = linear(
            norm(hidden, f"{name}.norm1"), f"{name}.self_attn.in_proj_weight", f"{name}.self_attn.in_proj_bias"
        )
        query, key, value = joint.view(-1, positions, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = seen.transpose(1, 2).reshape(sites, -1, width)
        hidden = hidden + linear(seen, f"{name}.self_attn.out_proj.weight", f"{name}.self_attn.out_proj.bias")
        inner = functional.gelu(linear(norm(hidden, f"{name}.norm2"), f"{name}.linear1.weight", f"{name}.linear1.bias"))
        hidden = hidden + linear(inner, f"{name}.linear2.weight", f"{name}.linear2.bias")
    return norm(hidden, "blocks.norm") @ parameters["head.weight"].mT


def averages_of(spec: str, layout: Layout) -> Simulation | SparseLoCo:
    """Return what averages differences: a compressor, "int2, fitted levels" or "sparseloco:share=0.015625,over=senders"."""
    if spec == FITTED:
        return Simulation(ErrorFeedback(TwoShot(FittedInt2())), layout)
    name, _, options = spec.partition(":")
    if name != "sparseloco":
        return Simulation(compressor(spec), layout)
    found = dict(option.split("=") for option in options.split(","))
    return SparseLoCo(layout, float(found["share"]), found["over"])


class Common:
    """What all sites have in common after a round, in the rows of a tensor: models, or moments."""

    def __init__(self, rows: Tensor, averages: Simulation | SparseLoCo, step: str) -> None:
        self.rows, self.averages, self.outer = rows, averages, outer(step)
        self.anchor, self.momentum = rows[0].clone(), torch.zeros_like(rows[0])

    def average(self, least: Tensor | None = None) -> float:
        """Have all rows be the new common one, or at least `least`. Return the bytes that a site sends."""
        difference = self.averages.step([self.anchor - row for row in self.rows])[0]
        self.outer.step(self.anchor, difference, self.momentum)
        self.rows.copy_(self.anchor if least is None else torch.maximum(self.anchor, least))
        return self.averages.traffic.sent_bytes


class Rounds:
    """Local SGD, from the common models of all sites."""

    def __init__(self, sites: Sites) -> None:
        way, state = sites.way, sites.adam.state[sites.others]
        self.way, self.done, self.since = way, 0, 0
        self.model = Common(sites.models.detach(), averages_of(way.compressor, sites.layout), way.outer)
        self.moments = [
            Common(state[name], averages_of(way.moments, sites.layout), "average") for name in MOMENTS if way.moments
        ]

    def after_step(self, factor: float, last: bool) -> float:
        """Average what is due after a step at a part of the largest learning rate. Return the bytes that a site sends."""
        self.since += 1
        if self.since < self.way.steps_between(factor) and not last:
            return 0.0
        self.since, self.done = 0, self.done + 1
        sent = self.model.average()
        for moment, rounds in zip(self.moments, self.way.rounds, strict=bool(self.moments)):
            if self.done % rounds == 0:
                sent += moment.average(LEAST * moment.rows if moment is self.moments[1] else None)
        return sent


def factor_of(step: int, steps: int) -> float:
    """Return the part of the largest learning rate of a step: a linear warm-up, then a cosine down to zero."""
    warmup = steps // WARMUP
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


def stacked(batches: Sequence[Iterator[Any]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the next inputs and targets of all sites."""
    while True:
        inputs, targets = zip(*map(next, batches), strict=True)
        yield torch.stack(inputs), torch.stack(targets)


def trained(way: Way, seed: int, dataset: Dataset, steps: int = STEPS) -> dict[str, Any]:
    """Train in one way. Return the bytes that a site sends in all, and the validation loss."""
    task = Task(MODELS[way.size], "adamw", way.lr, 0, steps)
    model = initial_model(task.config(seed), dataset, CPU)
    batch = round(BATCH * sum(map(torch.numel, model.parameters())) / PARAMETERS)
    sites, sent, start = Sites(model, way), 0.0, round(way.start * steps)
    gradients = Simulation(compressor(tuned(way.first, sites.optimizers)), sites.layout)
    batches = stacked([dataset.train_batches(batch, seed=seed, rank=site, world_size=SITES) for site in range(SITES)])
    rounds = None
    for step in range(steps):
        found, factor = sites.gradients(*next(batches)), factor_of(step, steps)
        if step < start:
            found = gradients.step([*found])[0].expand(SITES, -1).clone()
            sent += gradients.traffic.sent_bytes
        elif rounds is None:
            rounds = Rounds(sites)
        sites.step(found, factor)
        if rounds is not None:
            sent += rounds.after_step(factor, last=step + 1 == steps)
    values = {name: each[0] for name, each in sites.named(sites.models.detach()).items()}
    model.load_state_dict(values)
    loss = evaluation_of(held_out_sums(model, dataset.evaluation_batches(*VALIDATION), CPU)).loss
    return {"sent_bytes": round(sent), "loss": round(loss, 5)}


OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
RIVALS = ("SparseLoCo", "Nesterov")  # of other papers, which may gain by other settings


def runs_of(way: Way, steps: int, finished: FinishedRuns) -> dict[int, Any]:
    """Return a way's finished runs by their seeds."""
    found = {seed: finished.find({"way": way.changes, "steps": steps, "seed": seed}) for seed in SEEDS}
    return {seed: run for seed, run in found.items() if run}


def sent_bytes(runs: dict[int, Any]) -> int:
    """Return what a site sends in each of a way's runs."""
    return next(iter(runs.values()))["sent_bytes"]


def best(way: Way, steps: int, finished: FinishedRuns) -> dict[int, Any]:
    """Return the runs of `none` for a way's model and optimizer, at the rates where it ends lowest with most seeds."""
    base = way.size, way.optimizer, 1.0, "none"
    ways = [each for each in WAYS.values() if (each.size, each.optimizer, each.start, each.first) == base]
    found = [runs for way in ways if (runs := runs_of(way, steps, finished))]
    mean = {id(runs): statistics.fmean(each["loss"] for each in runs.values()) for runs in found}
    return min(found, key=lambda runs: (-len(runs), mean[id(runs)]), default={})


def above(runs: dict[int, Any], others: dict[int, Any]) -> list[float]:
    """Return by how many per cent the losses of runs are above others of their seeds."""
    return [100 * (runs[seed]["loss"] / others[seed]["loss"] - 1) for seed in sorted(runs.keys() & others.keys())]


def shown(runs: dict[int, Any], others: dict[int, Any]) -> str:
    """Return the mean of `above` with its 95 % interval, and the number of seeds."""
    values = above(runs, others)
    if not values:
        return "-"
    spread = f" ± {interval(values):.1f}" if len(values) > 1 else ""
    return f"{round(statistics.fmean(values), 1) + 0.0:+.1f}{spread} ({len(values)})"


def rows(finished: FinishedRuns) -> Iterator[list[str]]:
    """Yield the rows of a table, one for each way that has run."""
    yield ["way", "fewer bytes than fp32", "than bf16", *(f"after {steps} steps, % (seeds)" for steps in LENGTHS)]
    both = {
        name: [steps for steps in LENGTHS if runs_of(way, steps, finished) and best(way, steps, finished)]
        for name, way in WAYS.items()
    }
    ran = [name for name, lengths in both.items() if lengths]
    once = [word for word in RIVALS if sum(word in name for name in ran) == 1]
    for name in ran:
        way = WAYS[name]
        runs = {steps: runs_of(way, steps, finished) for steps in LENGTHS}
        steps = max(both[name])
        fewer = sent_bytes(best(way, steps, finished)) / sent_bytes(runs[steps])
        losses = [shown(runs[steps], best(way, steps, finished)) for steps in LENGTHS]
        note = " (one setting, not tuned)" if any(word in name for word in once) else ""
        yield [name + note, f"{fewer:.{int(fewer < 10)}f}x", f"{fewer / 2:.{int(fewer < 20)}f}x", *losses]


def table(finished: FinishedRuns) -> list[str]:
    """Return these rows as lines of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows(finished))
    return text.getvalue().splitlines()


def draw_all(finished: FinishedRuns, folder: Path) -> None:
    """Draw for each optimizer how far ways end above `none` at its best rate, by the bytes of a site in all steps."""
    for optimizer, steps in product(OPTIMIZERS, LENGTHS):
        rows = []
        for name, way in WAYS.items():
            runs, others = runs_of(way, steps, finished), best(way, steps, finished)
            if (way.size, way.optimizer) == (Way.size, optimizer) and runs.keys() & others.keys():
                values = above(runs, others)
                spread = interval(values) if len(values) > 1 else 0.0
                excess = {"loss": statistics.fmean(values), "loss.interval": spread}
                rows.append({"way": name, "sent": sent_bytes(runs), **excess})
        labels = {"x": "bytes that a site sends in all", "y": "validation loss above that of none, per cent"}
        picture = Figure(f"{optimizer}-{steps}", "points", "sent", ["loss"], ["way"], log=["x"], labels=labels)
        if len(rows) > 1:
            title = f"GPT of {Way.size} parameters, {OPTIMIZERS[optimizer]}, {steps} steps, 4 simulated sites"
            draw(picture, rows, title, folder)


def main() -> None:
    """Run all that the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help=f"those up to {SEEDS[-1]} are in the table")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"{LENGTHS} are in the table")
    parser.add_argument("--table", action="store_true", help="write ways.csv and pictures, and run nothing")
    parser.add_argument("--above", nargs=2, metavar="WAY@STEPS", help="print how far one ends above the other")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    finished = FinishedRuns(asked.file)
    if asked.above:
        pairs = (each.rsplit("@", 1) for each in asked.above)
        print(shown(*(runs_of(WAYS[name], int(steps), finished) for name, steps in pairs)))
        return
    if asked.table:
        asked.file.with_name("ways.csv").write_text("\n".join([*table(finished), ""]), "utf-8")
        draw_all(finished, asked.file.parent)
        return
    task = Task(MODELS[Way.size], "adamw", LR, 0, STEPS)
    dataset = load_dataset(task.data, task.model)
    for seed, name in product(asked.seeds, asked.ways):
        for run in finished.missing([{"way": WAYS[name].changes, "steps": asked.steps, "seed": seed}]):
            finished.add(run, **trained(WAYS[name], seed, dataset, asked.steps))


if __name__ == "__main__":
    main()
