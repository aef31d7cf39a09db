"""Bytes of text as tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset as Samples

from ..sample import Batch
from .dataset import Dataset

BYTES = 256
HELD_OUT = 10  # one file in ten, or the last tenth of a single file
CACHE = "__pycache__"  # changes while the training's own modules are imported
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", CACHE}


class Windows(Samples[Batch]):
    """Stretches of `context` tokens, one behind the other, each with the tokens that follow its own."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens, self.context = tokens, context

    def __len__(self) -> int:
        return max(0, self.tokens.numel() - 1) // self.context

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = self.tokens[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def text(path: Path | None, context: int) -> Dataset:
    """A file, a folder of files, or by default the source text of Python's standard library, as bytes.

    Files are read in the order of their names, and one in ten is for validation. Raises ValueError for what cannot be
    read and for too little text.
    """
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    train, held_out = _single(folder) if folder.is_file() else _split(_files(folder, only_python=path is None))
    samples, kept = Windows(tokens_of(train), context), Windows(tokens_of(held_out), context)
    if not (len(samples) and len(kept)):
        raise ValueError(
            f"{folder} holds too little text: {len(train)} bytes to train on and {len(held_out)} for validation, "
            f"and a sample takes {context + 1}"
        )
    return Dataset("text", "tokens", BYTES, (context,), samples, kept, str(path or "Python's standard library"))


def _files(folder: Path, *, only_python: bool) -> list[Path]:
    """All files below a folder but hidden ones and Python's caches; of the library its modules, which every host has."""
    if not folder.is_dir():
        raise ValueError(f"there is no text at {folder}: give --data.path a file or a folder")
    found = [file for file in sorted(folder.rglob("*.py" if only_python else "*")) if file.is_file()]
    unwanted = LEFT_OUT if only_python else {CACHE}
    inner = {file: file.relative_to(folder).parts for file in found}
    return [f for f in found if not unwanted.intersection(inner[f]) and not any(p.startswith(".") for p in inner[f])]


def _split(files: Sequence[Path]) -> tuple[bytes, bytes]:
    held_out = files[HELD_OUT - 1 :: HELD_OUT] or files[-1:]
    kept = set(held_out)
    return _read([file for file in files if file not in kept]), _read(held_out)


def _single(file: Path) -> tuple[bytes, bytes]:
    content = _read([file])
    cut = len(content) - len(content) // HELD_OUT
    return content[:cut], content[cut:]


def _read(files: Sequence[Path]) -> bytes:
    try:
        return b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise ValueError(f"cannot read the text: {error}") from error


def tokens_of(content: bytes) -> Tensor:
    """Return bytes as tokens: (length,) uint8."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
