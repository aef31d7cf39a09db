"""Losses of a linear model with AdamW, one of whose inputs is many times larger than the others.

    python docs/benchmarks/unequal_inputs.py --json docs/results/loss/unequal-inputs.json

Elements of a block share a scale, so gradients of the large input set the scale of their neighbours. The targets come from
inputs of equal size. So a model that learns from the large input alone ends near a loss of 1. Each of the 64 rows is one
block of 128 elements, with the large input's among them.
"""

from pathlib import Path

import torch
from driver import about, parser_of, write_results
from torch import Tensor, nn

from gradwire.compress import compressor
from gradwire.experiments.workloads.simulated import SimulatedRanks

COMPRESSORS = (
    "none",
    "bf16",
    "int8",
    "int8:error_feedback=true",
    "int4:error_feedback=true",
    "int4:error_feedback=false",
)
TIMES = (1, 30, 300, 1000, 3000)
INPUTS, OUTPUTS, RANKS, BATCH, STEPS, LR = 128, 64, 4, 64, 400, 3e-3


def loss_with(spec: str, times: float) -> float:
    """Train with a compressor on four simulated ranks. Return the mean squared error on new inputs; 1 without training."""
    drawn = torch.Generator().manual_seed(0)
    target = torch.randn(OUTPUTS, INPUTS, generator=drawn) / INPUTS**0.5
    sizes = torch.ones(INPUTS)
    sizes[5] = times
    model = nn.Linear(INPUTS, OUTPUTS, bias=False)
    nn.init.zeros_(model.weight)
    ranks = SimulatedRanks(model, compressor(spec), RANKS, None)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def error(rows: int) -> Tensor:
        x = torch.randn(rows, INPUTS, generator=drawn)
        return (model(x * sizes) - x @ target.T).square().mean()

    for _ in range(STEPS):
        for rank in range(RANKS):
            ranks.begin(rank)
            error(BATCH).backward()
        ranks.average()
        optimizer.step()
        schedule.step()
    return error(4096).item()


def line(times: str, losses: dict[str, float]) -> str:
    """Return a row of the table."""
    return f"| {int(times):,} times | {' | '.join(f'{each:.4f}' for each in losses.values())} |"


def main() -> None:
    """Print a row for each size, and write all."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| one input is larger |", " | ".join(f"`{spec}`" for spec in COMPRESSORS), "|")
    rows = {}
    for times in TIMES:
        rows[str(times)] = {spec: round(loss_with(spec, times), 6) for spec in COMPRESSORS}
        print(line(str(times), rows[str(times)]), flush=True)
    write_results(asked.json, {**about(), "rows": rows})


if __name__ == "__main__":
    main()
