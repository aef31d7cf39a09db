"""How many bytes Huffman codes would save of what compressors send.

    python docs/benchmarks/entropy_of_codes.py --json docs/results/loss/entropy-of-codes.json

The numbers are a gradient of the GPT with 0.9 M parameters of compressor_loss.py after 60 steps, and by how much the last
eight of them changed its parameters, as local SGD sends it.
"""

import time
import zlib
from pathlib import Path

import torch
from compressor_loss import CPU, LONGER, RANKS
from driver import about, parser_of, write_results
from torch import Tensor

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.compress.protocol.requests import Request
from gradwire.experiments.workloads.data import load_dataset
from gradwire.experiments.workloads.training import initial_model, loss_of

TASK, STEPS, CHANGED = LONGER["gpt-muon-0.9m"], 60, 8
SPECS = ("int8", "int4", "int2", "ternary", "onebit", "topk:ratio=0.01", "bf16")


def numbers() -> dict[str, Tensor]:
    """Return the last gradient, and the change of the parameters, flat."""
    dataset = load_dataset(TASK.data, TASK.model)
    model = initial_model(TASK.config(0), dataset, CPU)
    optimizers = TASK.optimizers(model)
    batches = dataset.train_batches(RANKS * TASK.batch_size, seed=0, rank=0, world_size=1)
    before: list[Tensor] = []
    for step in range(STEPS):
        if step == STEPS - CHANGED:
            before = [each.detach().clone() for each in model.parameters()]
        loss_of(model, *next(batches)).backward()
        if step < STEPS - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    pairs = list(zip(before, model.parameters(), strict=True))
    return {
        "gradient": torch.cat([now.grad.flatten() for _, now in pairs]),
        "change": torch.cat([(now.detach() - then).flatten() for then, now in pairs]),
    }


class Payloads(Simulation):
    """A simulation that keeps what rank 0 hands to collectives."""

    sent = b""

    def _note(self, request: Request) -> None:
        super()._note(request)
        self.sent += request.tensor.contiguous().view(torch.uint8).numpy().tobytes()


def main() -> None:
    """Print the share of bytes that Huffman codes leave, and the speed of the standard library's on one core."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path)
    asked, left = parser.parse_args(), dict[str, dict[str, float]]()
    torch.set_num_threads(1)
    for what, flat in numbers().items():
        layout = Layout(("flat",), ((flat.numel(),),), torch.float32, CPU, Ranks(RANKS))
        for spec in SPECS:
            simulation = Payloads(compressor(spec), layout)
            simulation.step([flat] * RANKS)
            codes, began = (
                zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, 8, zlib.Z_HUFFMAN_ONLY),
                time.perf_counter(),
            )
            shorter = len(codes.compress(simulation.sent) + codes.flush())
            speed = len(simulation.sent) / (time.perf_counter() - began)
            left.setdefault(what, {})[spec] = round(shorter / len(simulation.sent), 4)
            print(f"{what}, {spec}: {left[what][spec]:.2f} of the bytes, {speed / 1e6:.0f} MB/s")
    write_results(asked.json, {**about(), "left": left})


if __name__ == "__main__":
    main()
