"""Text that every Python installation has: the sources and documents of Python and of its installed packages."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .dataset import Dataset
from .text import BYTES, Windows, tokens_of

SUFFIXES = (".py", ".md", ".rst", ".txt")
TRAIN, VALIDATION, LARGEST_FILE = 24_000_000, 500_000, 500_000  # bytes, at most
ONE_IN = 20  # files are for validation


@dataclass(frozen=True)
class Part:
    """The bytes of some files, one behind the other with a zero between, and the number of files."""

    tokens: Tensor
    files: int


def installed() -> list[Path]:
    """Return the folders with Python's library and the installed packages."""
    return [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def split_by_file(roots: Iterable[Path], limit: int) -> tuple[Part, Part]:
    """Read text files of folders: at most `limit` bytes to train on, and validation files that are never trained on.

    One file in 20 is for validation, by the hash of its relative path. No content comes twice.
    """
    files = sorted(file for root in map(str, dict.fromkeys(roots)) for file in _files(root))
    seen: set[bytes] = set()
    validation = _read([path for digest, path in files if digest[-1] % ONE_IN == 0], VALIDATION, seen)
    train = _read([path for digest, path in files if digest[-1] % ONE_IN], limit, seen)
    return train, validation


def packages(path: Path | None, context: int) -> Dataset:
    """Return the text of installed packages, or of a folder, as bytes.

    Raises ValueError for too little text.
    """
    train, validation = split_by_file([path] if path else installed(), TRAIN)
    samples, held_out = Windows(train.tokens, context), Windows(validation.tokens, context)
    if not (len(samples) and len(held_out)):
        raise ValueError(f"{path} holds too few files of text ({', '.join(SUFFIXES)}): name a folder with more")
    digest = hashlib.sha256(train.tokens.numpy().tobytes() + validation.tokens.numpy().tobytes()).hexdigest()
    counted = (
        f"{train.tokens.numel()} bytes of {train.files} files, {validation.tokens.numel()} bytes of {validation.files}"
    )
    source = f"{path or 'installed packages'}: {counted} for validation, SHA-256 {digest[:12]}"
    return Dataset("packages", "tokens", BYTES, (context,), samples, held_out, source)


def _files(root: str) -> Iterator[tuple[bytes, str]]:
    """Yield (hash of the relative path, path) of each text file."""
    for folder, _, names in os.walk(root):
        for path in (os.path.join(folder, name) for name in names if name.endswith(SUFFIXES)):
            yield hashlib.sha256(os.path.relpath(path, root).encode()).digest(), path


def _read(paths: Iterable[str], limit: int, seen: set[bytes]) -> Part:
    """Read the first files, at most `limit` bytes; without contents that were seen, which grow by these."""
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
    return Part(tokens_of(b"\0".join(new)), len(new))
