"""How far Adam moves parameters whose gradients differ by up to 1e4, relative to a training without compression.

    python docs/benchmarks/small_parameters.py

Each gradient is one direction, with noise of 0.3 of its size on each of two simulated ranks. Shapes are those of a small
layer with an adapter. A parameter's movement is its distance from the start after 100 steps.
"""

import torch
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


def movements(spec: str) -> Tensor:
    """Train with a compressor. Return how far each parameter went, a vector of floats."""
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
                loss = loss + (each * size * (direction + NOISE * noise)).sum()
            loss.backward()
        ranks.average()
        optimizer.step()
    return torch.tensor([each.norm().item() for each in model])


if __name__ == "__main__":
    torch.set_num_threads(1)
    whole = movements("none")
    print("| compressor | least | most |\n|---|---|---|")
    for spec in COMPRESSORS:
        parts = movements(spec) / whole
        print(f"| `{spec}` | {parts.min():.2f} | {parts.max():.2f} |", flush=True)
