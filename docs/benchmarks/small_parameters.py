"""How far Adam moves parameters whose gradients differ by up to 1e4, relative to a training without compression.

    python docs/benchmarks/small_parameters.py --json docs/results/loss/small-parameters.json

Each gradient is one direction, with noise of 0.3 of its size on each of two simulated ranks. Shapes are those of a small
layer with an adapter. A parameter's movement is its distance from the start after 100 steps. A second training masks half of
the elements of the first matrix: their gradients are zero on both ranks.
"""

from pathlib import Path

import torch
from driver import about, parser_of, write_results
from torch import Tensor, nn

from gradwire.compress import compressor
from gradwire.experiments.workloads.simulated import SimulatedRanks

SHAPES = ((96, 64), (96,), (64, 96), (64,), (8, 64), (8,))
SIZES = (1.0, 1e-1, 1e-2, 1e-3, 1e-3, 1e-4)
COMPRESSORS = (
    "int8",
    "int4:error_feedback=false",
    "int4",
    "int2:error_feedback=false",
    "int2",
    "onebit",
    "onebit:rotate=false",
    "powersgd",
    "acp-powersgd",
    "batched-powersgd",
    "topk:scope=tensor,ratio=0.1",
    "topk:ratio=0.1",
    "dgc:ratio=0.1",
)
RANKS, STEPS, NOISE, LR = 2, 100, 0.3, 1e-3


def trained(spec: str, mask: Tensor | float = 1.0) -> nn.ParameterList:
    """Train from zeros with a compressor, where `mask` weighs the gradients of the first matrix."""
    drawn = torch.Generator().manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])
    directions = [torch.randn(shape, generator=drawn) for shape in SHAPES]
    ranks = SimulatedRanks(model, compressor(spec), RANKS, None)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    for _ in range(STEPS):
        for rank in range(RANKS):
            ranks.begin(rank)
            loss = torch.zeros(())
            for each, direction, size in zip(model, directions, SIZES, strict=True):
                noise = torch.randn(each.shape, generator=drawn)
                gradient = size * (direction + NOISE * noise)
                loss = loss + (each * (gradient * mask if each is model[0] else gradient)).sum()
            loss.backward()
        ranks.average()
        optimizer.step()
    return model


def movements(spec: str) -> Tensor:
    """Return how far each parameter went, a vector of floats."""
    return torch.tensor([each.norm().item() for each in trained(spec)])


def masked(spec: str) -> float:
    """Return how far masked elements went, relative to the others of their matrix."""
    mask = torch.rand(SHAPES[0], generator=torch.Generator().manual_seed(1)) < 0.5
    weights = trained(spec, mask.float())[0].detach()
    return (weights[~mask].norm() / weights[mask].norm()).item()


def main() -> None:
    """Print a row for each compressor, and write all."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    whole, rows = movements("none"), {}
    print("| compressor | least | most | masked elements |\n|---|---|---|---|")
    for spec in COMPRESSORS:
        parts = movements(spec) / whole
        rows[spec] = [round(each, 6) for each in (parts.min().item(), parts.max().item(), masked(spec))]
        print(line(spec, rows[spec]), flush=True)
    write_results(asked.json, {**about(), "rows": rows})


def line(spec: str, row: list[float]) -> str:
    """Return a row of the table."""
    return f"| `{spec}` | {' | '.join(f'{each:.2f}' for each in row)} |"


if __name__ == "__main__":
    main()
