"""Validation losses under Muon of error feedback on the momentum, of Dion's iteration, and of 2 bits with fitted levels.

    python docs/benchmarks/muon_feedback.py docs/results/loss/muon-feedback.json

The task is that of compressor_loss.py: a GPT on four simulated ranks, with Muon for the blocks' matrices and AdamW for the
rest. Each way changes what the matrices' gradients become; the rest is sent with the same compressor and error feedback.
None of the ways is a part of gradwire. Runs that the file has are skipped.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressor_loss import MUON_LR, TASKS, Task, trained
from driver import parser_of
from finished_runs import FinishedRuns
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gradwire.compress import Compressor, Layout, Program, all_reduce
from gradwire.compress.algorithms.adapters import TwoShot
from gradwire.compress.algorithms.dense import Dense
from gradwire.compress.algorithms.powersgd import PowerSGD
from gradwire.compress.algorithms.quantized import Int2, places_in_row
from gradwire.compress.algorithms.shared_random import seeded_generator, signs_of
from gradwire.compress.feedback.error_feedback import ErrorFeedback
from gradwire.compress.feedback.partition import Partition
from gradwire.experiments.workloads.data import load_dataset
from gradwire.experiments.workloads.muon import orthonormalized
from gradwire.kernels import Places, Residual, rotate_blocks

MOMENTUM, DECAY = 0.95, 0.1  # torch.optim.Muon's
MATRICES = ("*.in_proj_weight", "*.out_proj.weight", "*.linear1.weight", "*.linear2.weight")  # of the blocks
LEVELS = torch.tensor([-1.5104, -0.4528, 0.4528, 1.5104])  # of normal numbers of variance 1 (Max 1960)
EDGES = (LEVELS[1:] + LEVELS[:-1]) / 2


@dataclass(frozen=True)
class DifferencesOfMomentum:
    """EF21-SGDM (Fatkhullin et al. 2023), as EF21-Muon (Gruntkowska et al. 2025) has it before Muon's arithmetic.

    Each rank sends by how much its momentum differs from what it has sent in all. The momentum is Nesterov's, so that
    without compression the training is that of Muon.
    """

    inner: Compressor

    def init(self, layout: Layout) -> list[Any]:
        """Return the momentum, what was sent in all by this rank and by the mean of ranks, and the inner state."""
        return [*(torch.zeros(layout.numel) for _ in range(3)), self.inner.init(layout)]

    def reduce(self, grad: Tensor, state: list[Any], residual: Residual | None = None) -> Program[Tensor]:
        """Return the mean of what ranks have sent in all, in place of `grad`."""
        momentum, sent, mean, inner = state
        momentum.lerp_(grad, 1 - MOMENTUM)
        difference = grad.lerp(momentum, MOMENTUM) - sent
        held = Residual(torch.zeros_like(grad), torch.zeros_like(grad))
        mean += yield from self.inner.reduce(difference.clone(), inner, held)
        sent += difference - held.after
        if residual is not None:
            residual.after.zero_()
        return grad.copy_(mean)


@dataclass(frozen=True)
class Dion:
    """A power iteration on the momentum, which keeps what a step leaves out (Ahn et al. 2025, Dion)."""

    rank: int

    def init(self, layout: Layout) -> list[list[Tensor]]:
        """Return the momenta and the right factors of all matrices."""
        pairs = zip(layout.names, layout.shapes, strict=True)
        right = [torch.randn(shape[1], self.rank, generator=seeded_generator("dion", name)) for name, shape in pairs]
        return [[torch.zeros(shape) for shape in layout.shapes], right, [torch.Size(each) for each in layout.shapes]]

    def reduce(self, grad: Tensor, state: list[list[Any]], residual: Residual | None = None) -> Program[Tensor]:
        """Return the low-rank part of the mean momentum, in place of `grad`."""
        momenta, right, shapes = state
        for place, part in enumerate(grad.split([shape.numel() for shape in shapes])):
            momentum = momenta[place].add_(part.view(shapes[place]))
            left, _ = torch.linalg.qr((yield from all_reduce(momentum @ right[place])))
            factor = yield from all_reduce(momentum.mT @ left)
            momentum.addmm_(left, factor.mT, alpha=MOMENTUM - 1)
            part.view(shapes[place]).copy_(left @ factor.mT)
            right[place] = factor / factor.norm(dim=0).clamp(min=1e-12)
        if residual is not None:
            residual.after.zero_()
        return grad


@dataclass(frozen=True)
class FittedInt2(Int2):
    """2 bits with the four levels that lose least of normal numbers, times the root mean square of a rotated block."""

    def encode(
        self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int, places: Places | None = None, **_: int
    ) -> None:
        """Write codes and scales; `residual` keeps the difference."""
        flat = grad if residual is None else residual.plus(grad)
        blocks = torch.zeros(len(rows) * length // self.block, self.block)
        at, inside = elements(blocks, flat.numel(), places)
        blocks[inside] = flat[at[inside]]
        rotate_blocks(blocks.view(-1), signs := signs_of(self.block, flat))
        scale = blocks.square().mean(1, keepdim=True).sqrt()
        chosen = torch.bucketize(blocks / scale.clamp(min=1e-30), EDGES)
        scales, codes = self.parts(rows, length)
        scales.copy_(scale.view_as(scales))
        codes.copy_((chosen.view(*codes.shape, 4) << torch.arange(0, 8, 2)).sum(-1).to(torch.uint8))
        if residual is not None:
            rotate_blocks((lost := blocks - LEVELS[chosen] * scale).view(-1), signs, True)
            residual.after[at[inside]] = lost[inside]

    def decode(
        self, rows: Tensor, out: Tensor, length: int, residual: Tensor | None = None, places: Places | None = None
    ) -> None:
        """Write the mean over voters."""
        scales, codes = self.parts(rows, length)
        chosen = (codes.unsqueeze(-1) >> torch.arange(0, 8, 2)) & 3
        values = LEVELS[chosen.int()].view(*scales.shape, self.block) * scales.unsqueeze(-1)
        blocks = values.mean(0).view(-1, self.block)
        rotate_blocks(blocks.view(-1), signs_of(self.block, out), True)
        at, inside = elements(blocks, out.numel(), places)
        out[at[inside]] = blocks[inside]

    def parts(self, rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the scales and the codes of rows."""
        scales, codes = places_in_row(self.bits, self.block, length)
        return rows[..., scales].view(torch.float32), rows[..., codes]


def elements(blocks: Tensor, numel: int, places: Places | None) -> tuple[Tensor, Tensor]:
    """Return the place of each element of blocks in a vector of `numel` elements, and whether it is there."""
    if places is not None:
        return places.elements(blocks.shape[1])
    at = torch.arange(blocks.numel()).view_as(blocks)
    return at, at < numel


class Orthonormalized(Optimizer):
    """Muon without momentum, in float32: what ranks average has the momentum already."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices."""
        for group in self.param_groups:
            for each in group["params"]:
                wider = max(1.0, each.shape[0] / each.shape[1]) ** 0.5
                each.mul_(1 - group["lr"] * DECAY).add_(orthonormalized(each.grad), alpha=-group["lr"] * wider)


class WithMomentumOnRanks(Task):
    """The same task where the ranks have the momentum of the blocks' matrices."""

    def optimizers(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers of matrices and of the rest."""
        matrices = [each for each in model.blocks.parameters() if each.dim() > 1]
        others = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
        return [Orthonormalized(matrices, {"lr": MUON_LR}), AdamW(others, self.lr)]


TASK = TASKS["gpt-muon"]
ON_RANKS = WithMomentumOnRanks(**vars(TASK))
LOW_RANK, TWO_BITS = PowerSGD(8, payload="int8"), TwoShot(Int2())


def of_matrices(inner: Compressor, rest: Compressor) -> Compressor:
    """Return a compressor of the blocks' matrices, beside one of all else."""
    return ErrorFeedback(Partition(tuple((name, inner) for name in MATRICES), rest))


WAYS: dict[str, tuple[Task, str | Compressor]] = {
    "none": (TASK, "none"),
    "none, momentum on the ranks": (ON_RANKS, of_matrices(DifferencesOfMomentum(Dense()), Dense())),
    "int2": (TASK, "int2"),
    "int2, fitted levels": (TASK, ErrorFeedback(TwoShot(FittedInt2()))),
    "int2, EF21": (ON_RANKS, of_matrices(DifferencesOfMomentum(TWO_BITS), TWO_BITS)),
    "powersgd:rank=8,payload=int8": (TASK, "powersgd:rank=8,payload=int8"),
    "powersgd:rank=8,payload=int8, EF21": (ON_RANKS, of_matrices(DifferencesOfMomentum(LOW_RANK), LOW_RANK)),
    "Dion, rank 8": (ON_RANKS, of_matrices(Dion(8), LOW_RANK)),
}


def main() -> None:
    """Run all that the file lacks."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="of the results, which grows by a run at a time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    finished, dataset = FinishedRuns(asked.file), load_dataset(TASK.data, TASK.model)
    for run in finished.missing({"way": way, "seed": seed} for seed in asked.seeds for way in asked.ways):
        task, built = WAYS[run["way"]]
        found = trained(built, task, run["seed"], dataset)
        finished.add(run, sent_bytes=found["sent_bytes"], loss=found["loss"])


if __name__ == "__main__":
    main()
