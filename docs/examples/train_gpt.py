"""Pretrains a small GPT with AdamW or Muon: torchrun --nproc-per-node 2 train_gpt.py --optimizer muon --compressor int8."""

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradwire
from gradwire.experiments.workloads.data.text import text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"steps": 150, "seed": 0, "context": 128, "width": 128, "layers": 4, "heads": 4}


class GPT(nn.Module):
    """A decoder-only transformer: bytes in, logits of the next bytes out."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--compressor", default="int8", help="none, bf16, int8, int4, ...")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the model and its gradients")
    parser.add_argument("--text", type=Path, help="a file or folder; by default Python's standard library")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=8, help="samples per rank")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=" ")
    return parser.parse_args()


def optimizers(model: nn.Module, name: str, lr: float) -> list[Optimizer]:
    """AdamW; or Muon for the matrices of the blocks, and AdamW for the rest."""
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=lr)]
    matrices = [each for each in model.blocks.parameters() if each.ndim == 2]
    rest = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=lr, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=lr)]


def train(model: nn.Module, optimizers: list[Optimizer], batches: Iterator[Any], device: torch.device) -> None:
    model.train()
    for inputs, targets in batches:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(model(inputs.to(device)).flatten(0, 1).float(), targets.to(device).flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterator[Any], device: torch.device) -> float:
    """Mean cross-entropy per byte, in nats."""
    model.eval()
    losses = [cross_entropy(model(x.to(device)).flatten(0, 1).float(), y.to(device).flatten()) for x, y in batches]
    return torch.stack(losses).mean().item()


def report(args: argparse.Namespace, loss: float, sent_bytes: float | None) -> None:
    """Print the settings and the outcome in a line of JSON, on the first rank."""
    found = {"ranks": dist.get_world_size(), "validation_loss": loss, "sent_bytes_per_step": sent_bytes}
    if dist.get_rank() == 0:
        print(json.dumps({**vars(args), "text": str(args.text), **found}))


def main() -> None:
    args = arguments()
    device = gradwire.init_process_group()  # NCCL if each rank has a GPU, else Gloo
    data = text(args.text, args.context)
    torch.manual_seed(args.seed)
    model = GPT(args.context, args.width, args.layers, args.heads).to(device, DTYPES[args.dtype])
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    chosen = optimizers(model, args.optimizer, args.lr)
    handle = gradwire.attach(ddp_model, args.compressor, optimizer=chosen)  # gradwire: the line to add

    batches = data.train_batches(args.batch, seed=args.seed, rank=dist.get_rank(), world_size=dist.get_world_size())
    train(ddp_model, chosen, islice(batches, args.steps), device)
    loss = validation_loss(model, data.evaluation_batches(16, 40), device)
    report(args, loss, handle.stats().last.traffic.sent_bytes)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
