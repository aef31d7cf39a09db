"""A GPT on bytes, and the text for it that every Python installation has: its own sources and documents."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {"gpt2": (18, 768, 12, 512), "tiny": (2, 64, 2, 64)}  # layers, width, heads, bytes of a sequence
SUFFIXES = (".py", ".md", ".rst", ".txt")
LARGEST_FILE, VALIDATION = 500_000, 500_000  # bytes


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
    files = sorted(file for root in map(str, dict.fromkeys(roots)) for file in _files(root))
    seen: set[bytes] = set()
    validation, validation_files = _read([path for digest, path in files if digest[-1] % 20 == 0], VALIDATION, seen)
    train, train_files = _read([path for digest, path in files if digest[-1] % 20], limit, seen)
    if min(len(validation), len(train)) <= length:
        raise SystemExit(f"there are too few text files ({', '.join(SUFFIXES)}) in {[*map(str, roots)]}: give others")
    windows = validation[: len(validation) // (length + 1) * (length + 1)].view(-1, length + 1)
    about = {"train_bytes": len(train), "train_files": train_files}
    about |= {"validation_bytes": windows.numel(), "validation_files": validation_files}
    return Text(train.to(device), windows.to(device), about)


def _files(root: str) -> Iterable[tuple[bytes, str]]:
    """Yield (hash of the relative path, path) of each text file."""
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names if name.endswith(SUFFIXES)):
            yield hashlib.sha256(os.path.relpath(path, root).encode()).digest(), path


def _read(paths: Iterable[str], limit: int, seen: set[bytes]) -> tuple[Tensor, int]:
    """Return the bytes of the first files, at most `limit`, and the number of files; no content twice."""
    chosen, total = [], 0
    for path in paths:
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        if 0 < size <= min(LARGEST_FILE, limit - total):
            chosen.append(Path(path))
            total += size
        if total > 0.99 * limit:
            break
    with ThreadPoolExecutor(16) as pool:
        texts = {hashlib.sha256(text).digest(): text for text in pool.map(Path.read_bytes, chosen)}
    new = [text for digest, text in texts.items() if digest not in seen]
    seen.update(texts)
    return torch.frombuffer(bytearray(b"\0".join(new)), dtype=torch.uint8), len(new)
