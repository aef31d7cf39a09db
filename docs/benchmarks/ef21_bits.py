"""Norm of the gradient by bits sent, with EF14 and EF21 and with and without momentum, on logistic regression.

    python docs/benchmarks/ef21_bits.py docs/results/papers/ef21-bits.json

Twenty simulated ranks share scikit-learn's digits, sorted by class, so that each rank has one or two classes. The loss has
the nonconvex regularizer of the paper, lambda sum x^2 / (1 + x^2). Each rank sends the 10 largest of 650 elements, 64 bits
each, per step. The learning rate is the best of a list for each row: the one with the smallest norm at the end.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from driver import about, parser_of, write_results
from torch import Tensor

RANKS, KEPT, BITS = 20, 10, 64  # ranks; elements that each sends in a step; bits of an element and its place
STEPS, ETA, LAMBDA = 2000, 0.1, 1e-3  # steps; weight of the newest gradient in the momentum; of the regularizer
RATES = tuple(2.0**power for power in range(-5, 9))  # learning rates, all at once
BATCHES = (1, 0)  # samples per rank and step; 0: all that a rank has
LAST = 10  # the norm at the end is the mean over the last tenth of the steps
LOOK = 50  # steps between two norms
HEADS = (
    "samples per rank",
    "name in the paper",
    "gradwire",
    "bits per rank",
    "learning rate",
    "norm, 1/4 of the bits",
    "norm, all bits",
)
COMPRESSORS = {
    "uncompressed SGD": "`none`",
    "EF14-SGD": "`topk:k=10`",
    "EF14-SGD with momentum": "`topk:k=10,momentum=0.9`",
    "EF21-SGD": "-",
    "EF21-SGDM": "-",
}


@dataclass(frozen=True)
class Problem:
    """The samples of each rank (ranks, samples, features) and their labels as zeros and ones (ranks, samples, classes)."""

    samples: Tensor
    labels: Tensor

    def gradients(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the gradients (rates, ranks, features, classes) at the points `x` (rates, features, classes).

        `chosen`: the samples of each rank (ranks, batch).
        """
        ranks = torch.arange(len(chosen))[:, None]
        samples, labels = self.samples[ranks, chosen], self.labels[ranks, chosen]
        wrong = torch.einsum("nbf,sfc->snbc", samples, x).softmax(-1) - labels
        regular = 2 * LAMBDA * x / (1 + x.square()).square()
        return torch.einsum("nbf,snbc->snfc", samples, wrong) / chosen.shape[1] + regular[:, None]

    def all_samples(self) -> Tensor:
        """Return the samples of each rank, to choose all."""
        return torch.arange(self.samples.shape[1]).expand(len(self.samples), -1)


def digits() -> Problem:
    """Return scikit-learn's digits, sorted by class, in parts of equal size; the rest is left out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = torch.from_numpy(bunch.target).argsort(stable=True)
    images = torch.from_numpy(bunch.data).float()[order] / 16
    samples = torch.cat([images, torch.ones(len(images), 1)], dim=1)
    labels = torch.nn.functional.one_hot(torch.from_numpy(bunch.target).long()[order], 10).float()
    each = len(samples) // RANKS
    return Problem(*(part[: RANKS * each].view(RANKS, each, -1) for part in (samples, labels)))


def largest(values: Tensor) -> Tensor:
    """Return the `KEPT` largest elements of each rank's flat row, and zeros for the others."""
    places = values.abs().topk(KEPT, dim=-1).indices
    return torch.zeros_like(values).scatter_(-1, places, values.gather(-1, places))


class Ranks:
    """The state of all ranks: the residual of EF14 or the estimate of EF21, and the momentum."""

    def __init__(self, name: str, rates: int, elements: int) -> None:
        self.name = name
        self.kept, self.momentum = torch.zeros(2, rates, RANKS, elements)

    def average(self, gradients: Tensor) -> Tensor:
        """Return the direction of a step (rates, elements) from the ranks' flat gradients."""
        if self.name.endswith(("momentum", "SGDM")):
            self.momentum.lerp_(gradients, ETA)
            gradients = self.momentum
        if self.name.startswith("EF14"):
            sent = largest(self.kept + gradients)
            self.kept += gradients - sent
            return sent.mean(1)
        if self.name.startswith("EF21"):
            self.kept += largest(gradients - self.kept)
            return self.kept.mean(1)
        return gradients.mean(1)


def norms(name: str, batch: int, seed: int, problem: Problem, steps: int = STEPS) -> Tensor:
    """Return the norm of the full gradient (looks, rates), every `LOOK` steps."""
    private = torch.Generator().manual_seed(seed)
    shape = (problem.samples.shape[2], problem.labels.shape[2])
    ranks, rates, everything = Ranks(name, len(RATES), shape[0] * shape[1]), torch.tensor(RATES), problem.all_samples()
    x, found = torch.zeros(len(RATES), *shape), []
    for step in range(steps):
        if step % LOOK == 0:
            found.append(problem.gradients(x, everything).mean(1).flatten(1).norm(dim=1))
        size = (RANKS, batch)
        chosen = torch.randint(everything.shape[1], size, generator=private) if batch else everything
        direction = ranks.average(problem.gradients(x, chosen).flatten(2))
        x -= rates[:, None, None] * direction.view_as(x)
    return torch.stack(found)


def row(name: str, batch: int, seeds: range, problem: Problem) -> dict:
    """Return the norms of one row: the mean over seeds at a quarter of the bits and at the end, at the best rate."""
    seeds = seeds if batch else seeds[:1]  # nothing is drawn where all samples are used
    curves = torch.stack([norms(name, batch, seed, problem) for seed in seeds]).mean(0).nan_to_num(nan=torch.inf)
    count = max(1, len(curves) // LAST)
    best = int(curves[-count:].mean(0).argmin())
    quarter = len(curves) // 4
    sent = BITS * KEPT if name.startswith("EF") else 32 * problem.samples.shape[2] * problem.labels.shape[2]
    return {
        "name": name,
        "batch": batch,
        "lr": RATES[best],
        "bits": sent * STEPS,
        "quarter": float(curves[quarter - count : quarter, best].mean()),
        "end": float(curves[-count:, best].mean()),
    }


def table(rows: list[dict]) -> str:
    """Return the page's table."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for each in rows:
        cells = [str(each["batch"] or "all"), each["name"], COMPRESSORS[each["name"]], f"{each['bits'] / 1e6:,.1f} M"]
        cells += [f"{each['lr']:g}", *(f"{each[when]:.{4 + (each[when] < 1e-3)}f}" for when in ("quarter", "end"))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compute all rows, write them, and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path, help="of the results")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    problem = digits()
    rows = [row(name, batch, range(asked.seeds), problem) for batch in BATCHES for name in COMPRESSORS]
    write_results(asked.file, {**about(), "seeds": asked.seeds, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
