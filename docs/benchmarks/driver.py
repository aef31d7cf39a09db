"""What the scripts of this folder share: their command line, and the file of their results."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import gradwire


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def processor() -> str:
    """Return the name of the host's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown")


def about(device: str = "cpu") -> dict[str, str]:
    """Return the versions and the processor, or the GPU, that results come from."""
    versions = {"torch": torch.__version__, "gradwire": gradwire.__version__}
    return versions | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {"machine": processor()})


def write_results(file: Path | None, results: Any) -> None:
    """Write results as JSON, if there is a file."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1) + "\n")
