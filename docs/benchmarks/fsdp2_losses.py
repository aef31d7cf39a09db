"""Validation losses with FSDP2's communication by gradwire: simulated ranks in one process.

    python fsdp2_losses.py none/none int8/int4 int4/int4 int4:send=weights/int4 --json fsdp2-losses.json

WEIGHTS/GRADIENTS name the compressors of the gather and of the reduction. The model is the GPT on bytes of `bytes_gpt.py`,
tiny size; the text is the Python installation's own sources. A module per block, and one for the rest, is cut into one shard
per rank, as `fully_shard` cuts it. gradwire's own programs gather the weights and sum the gradients. The optimizer, AdamW,
updates the exact shards. All compressors begin with the same weights and take the same batches. The losses are those of the
exact weights, as a checkpoint has them.
"""

import argparse
import json
import os
import statistics
import sysconfig
from itertools import product
from math import cos, pi
from pathlib import Path

import torch
from bytes_gpt import SIZES, Gpt, Text, loss_of, text_of, validation_loss
from driver import parser_of
from torch import Tensor, nn

from gradwire.compress import Layout, Ranks, simulate
from gradwire.compress.shards.layout import ShardLayout
from gradwire.compress.shards.reduction import Finite, shard_sum
from gradwire.compress.shards.weights import HeldWeights, OwnRows, WeightKind, weight_gather
from gradwire.compress.state.tree import Leaves
from gradwire.experiments.results.statistics import interval

WARM = 20  # steps in which the learning rate grows


class Module:
    """The parameters that travel together, on all ranks: the exact ones, and those in use in the model."""

    def __init__(self, named: dict[str, nn.Parameter], ranks: int, spec: str, per_host: int) -> None:
        self.in_use = named
        self.exact = {name: nn.Parameter(each.detach().clone()) for name, each in named.items()}
        shapes = tuple(tuple(each.shape) for each in named.values())
        wholes = (
            Layout(tuple(named), shapes, torch.float32, torch.device("cpu"), Ranks(ranks, r)) for r in range(ranks)
        )
        self.layouts = [ShardLayout(whole, (0,) * len(named)) for whole in wholes]
        gather, _, reduce = spec.partition("/")
        gathers, sums = weight_gather(gather), shard_sum(reduce or gather)
        self.gather = gathers.placed(per_host if gathers.hosts else 1, ranks)
        self.sum = sums.placed(per_host if sums.hosts else 1, ranks)
        self.held = [HeldWeights(OwnRows.empty(each)) if self.gather.differences else None for each in self.layouts]
        self.kinds = [WeightKind(torch.float32, each) for each in self.layouts]
        self.states = [self.sum.init(each) for each in self.layouts]
        self.leaves = [Leaves(state) for state in self.states]

    def flat(self, named: dict[str, Tensor]) -> Tensor:
        """Return whole parameters as rows of shards."""
        flat = torch.zeros(self.layouts[0].numel)
        for name, whole in named.items():
            self.layouts[0].cut(name, whole, flat)
        return flat

    @torch.no_grad()
    def fill(self) -> None:
        """Gather the weights in use from the exact shards."""
        rows = self.flat(self.exact).view(len(self.layouts), -1)
        outs = [torch.empty(rows.numel()) for _ in rows]
        each_rank = zip(rows, outs, self.kinds, self.held, strict=True)
        simulate([self.gather.gather(*each) for each in each_rank], self.gather.per_host)
        assert all(torch.equal(out, outs[0]) for out in outs)
        for name, whole in self.layouts[0].joined(outs[0]).items():
            self.in_use[name].copy_(whole)

    def average(self, gradients: list[dict[str, Tensor]]) -> None:
        """Give the exact weights the mean of all ranks' gradients."""
        outs = [torch.empty(layout.row) for layout in self.layouts]
        for state, leaves in zip(self.states, self.leaves, strict=True):
            leaves.end_step(keep=True)
            state.finite = Finite()
        given = zip(map(self.flat, gradients), self.states, outs, strict=True)
        simulate([self.sum.reduce(*each) for each in given], self.sum.per_host)
        for name, mean in self.layouts[0].joined(torch.cat(outs)).items():
            self.exact[name].grad = mean


def trained(spec: str, seed: int, text: Text, args: argparse.Namespace) -> float:
    """Return the validation loss after a training."""
    torch.manual_seed(seed)
    model = Gpt("tiny")
    inside = {name for name, _ in model.named_parameters() if name.startswith("blocks.")}
    names = [{name for name in inside if name.startswith(f"blocks.{place}.")} for place in range(len(model.blocks))]
    names.append({name for name, _ in model.named_parameters()} - inside)
    modules = [
        Module({n: p for n, p in model.named_parameters() if n in own}, args.ranks, spec, args.per_host)
        for own in names
    ]
    exact = [parameter for module in modules for parameter in module.exact.values()]
    optimizer = torch.optim.AdamW(exact, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM, 0.55 + 0.45 * cos(pi * step / args.steps))
    )
    draws = torch.Generator().manual_seed(1000 + seed)
    for _ in range(args.steps):
        for module in modules:
            module.fill()
        gradients = []
        for _ in range(args.ranks):
            starts = torch.randint(len(text.train) - model.length - 1, (args.batch, 1), generator=draws)
            model.zero_grad()
            loss_of(model, text.train[starts + torch.arange(model.length + 1)].long()).backward()
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for module in modules:
            module.average([{name: each[name] for name in module.exact} for each in gradients])
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for module in modules:
            for name, parameter in module.exact.items():
                module.in_use[name].copy_(parameter)
    return validation_loss(model, text.validation)


class Losses:
    """The losses of a file by compressor and seed, all with the same settings; several processes may fill it."""

    def __init__(self, path: Path | None, settings: dict[str, object]) -> None:
        self.path, self.settings = path, settings
        self.read: dict[str, dict[str, float]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read what the file has now. Exits if it is of other settings."""
        if self.path is None or not self.path.exists():
            return
        found = json.loads(self.path.read_text())
        if found.get("settings") != self.settings:
            raise SystemExit(
                f"{self.path} has losses with {found.get('settings')}, here are {self.settings}: give another file"
            )
        self.read = found["losses"]

    def add(self, spec: str, seed: int, loss: float) -> None:
        """Write one more loss to the file."""
        self.refresh()
        self.read.setdefault(spec, {})[str(seed)] = loss
        if self.path is not None:
            unfinished = self.path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"settings": self.settings, "losses": self.read}, indent=1) + "\n")
            unfinished.replace(self.path)

    def row(self, spec: str, first: str, seeds: list[int]) -> str:
        """Return a row of a table: a compressor's losses, and the excess over the first one's, with its 95 % interval."""
        pairs = [(self.read[spec][str(seed)], self.read[first][str(seed)]) for seed in seeds]
        excess = [100 * (mine / base - 1) for mine, base in pairs]
        shown = ", ".join(f"{mine:.4f}" for mine, _ in pairs)
        half = f" ± {interval(excess):.1f}" if len(excess) > 1 else ""
        return f"| `{spec}` | {shown} | {statistics.fmean(excess):+.1f}{half} % |"


def main() -> None:
    """Train what the file lacks, and print each compressor's losses and the excess over the first one's by seed."""
    parser = parser_of(__doc__)
    parser.add_argument("compressors", nargs="+", metavar="WEIGHTS/GRADIENTS")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=2, help="ranks of each host, for hosts+")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--validation", type=int, default=2000, help="windows")
    parser.add_argument("--json", type=Path, help="the file of losses; trainings that it has are skipped")
    args = parser.parse_args()
    torch.set_num_threads(1)  # losses do not depend on the number of cores
    text = text_of([Path(sysconfig.get_paths()["stdlib"])], 8_000_000, SIZES["tiny"][3], torch.device("cpu"))
    text = Text(text.train, text.validation[: args.validation], text.about)
    names = ("ranks", "per_host", "steps", "batch", "lr", "validation")
    settings = {name: getattr(args, name) for name in names} | text.about
    losses = Losses(args.json, settings)
    for seed, spec in product(args.seeds, args.compressors):
        losses.refresh()
        if str(seed) not in losses.read.get(spec, {}):
            losses.add(spec, seed, trained(spec, seed, text, args))
    for spec in args.compressors:
        print(losses.row(spec, args.compressors[0], args.seeds))


if __name__ == "__main__":
    main()
