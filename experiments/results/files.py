"""Files that a command is asked to write, refused before it measures; they name its command line and its host."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ... import __version__


def check_file(option: str, path: str | None) -> None:
    """Raise ValueError where the path of an option is that of no file that this user may write; None is no file."""
    if not path:
        return
    file = Path(path).expanduser()
    if not file.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {file.parent}")
    if file.is_dir():
        raise ValueError(f"{option}: {file} is a folder; name a file, such as {file / 'figures.json'}")
    needed = [file] if _special(file) else [each for each in (file, file.parent) if each.exists()]
    if not all(os.access(each, os.W_OK) for each in needed):
        raise ValueError(f"{option}: {file} cannot be written by this user; name a file in another folder")


def check_folder(option: str, path: str | None) -> None:
    """Raise ValueError where the path of an option is that of no folder that this user may make or write to."""
    if not path:
        return
    folder = Path(path).expanduser()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"{option}: {there} is a file; name a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: {there} cannot be written to by this user; name another folder")


def prepared_folder(path: str) -> Path:
    """Make the folder that `--out` names, or its default, if need be. Raises ValueError where nothing can be put there."""
    check_folder("out", path)
    folder = Path(path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to --out {folder}: {error.strerror}; name another folder") from error
    return folder


def command_line() -> str:
    """The command that is running, as typed behind the prompt."""
    return shlex.join(["gradwire", *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """The host that the figures come from."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def figures_document(kind: str, config: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the contents of a command's file: versions, command line, host, options (a dataclass) and rows."""
    versions = {"kind": kind, "gradwire": __version__, "torch": torch.__version__}
    about = {"command": command_line(), "environment": environment(), "config": asdict(config)}
    return {**versions, **about, "rows": list(rows)}


def write_json(document: Mapping[str, Any], path: str) -> None:
    """Write what `--json` asks for, a file whole or not at all. Raises ValueError where the system does not write it."""
    file = Path(path).expanduser()
    written = file if _special(file) else file.with_name(file.name + ".part")
    try:
        written.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if written != file:
            written.replace(file)
    except OSError as error:
        raise ValueError(f"cannot write --json {file}: {error.strerror}; the table above has the figures") from error


def _special(file: Path) -> bool:
    """Return True for a pipe or a device, which no file may replace."""
    return file.exists() and not file.is_file()
