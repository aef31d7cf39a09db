"""A GPT on bytes, and the text of installed packages for it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.experiments.workloads.data.packages import SUFFIXES, split_by_file

SIZES = {
    "gpt2": (18, 768, 12, 512),
    "small": (6, 384, 6, 256),
    "tiny": (2, 64, 2, 64),
}  # layers, width, heads, bytes of a sequence


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width) for the same."""
        qkv = self.qkv(self.before(x)).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A GPT on bytes with learned positions, initialized like GPT-2."""

    def __init__(self, size: str) -> None:
        super().__init__()
        layers, width, heads, self.length = SIZES[size]
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(self.length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (batch, length, 256) of the next bytes."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte; autocast on a GPU alone."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, windows: Tensor) -> float:
    """Return the mean loss over all windows."""
    total = sum(loss_of(model, part.long()) * len(part) for part in windows.split(64))
    return float(total) / len(windows)


@dataclass(frozen=True)
class Text:
    """Bytes for training, windows of bytes for validation, both on the device; and the numbers of bytes and files."""

    train: Tensor
    validation: Tensor
    about: dict[str, int]


def text_of(roots: Iterable[Path], limit: int, length: int, device: torch.device) -> Text:
    """Read at most `limit` bytes for training; one file in 20, by the hash of its relative path, is for validation."""
    train, validation = split_by_file(roots, limit)
    if min(len(validation.tokens), len(train.tokens)) <= length:
        raise SystemExit(f"there are too few text files ({', '.join(SUFFIXES)}) in {[*map(str, roots)]}: give others")
    whole = len(validation.tokens) // (length + 1) * (length + 1)
    windows = validation.tokens[:whole].view(-1, length + 1)
    about = {"train_bytes": len(train.tokens), "train_files": train.files}
    about |= {"validation_bytes": windows.numel(), "validation_files": validation.files}
    return Text(train.tokens.to(device), windows.to(device), about)
