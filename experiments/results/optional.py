"""Libraries that only some commands need: what is done without them, and what brings them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

INSTALL = {  # import name: what brings it
    "jinja2": "gradwire[experiments]",
    "jsonargparse": "jsonargparse[signatures]",
    "matplotlib": "gradwire[experiments]",
    "rich": "rich",
    "sklearn": "gradwire[experiments]",
    "tensorboard": "gradwire[tensorboard]",
    "torchvision": "gradwire[vision]",
    "transformers": "gradwire[transformers]",
    "wandb": "gradwire[wandb]",
    "yaml": "PyYAML",
}


def way_to_install(error: ModuleNotFoundError) -> str | None:
    """Return the missing library and the way to get it; None if the missing module is none of them."""
    library = (error.name or "").partition(".")[0]
    return f"{library} is not installed; pip install '{INSTALL[library]}'" if library in INSTALL else None


def optional_files(write: Callable[[], Sequence[Path]]) -> tuple[Sequence[Path], str]:
    """The files that `write` writes, and where they are in words; none, and why, where a library is missing for them."""
    try:
        files = write()
    except ModuleNotFoundError as error:
        if (way := way_to_install(error)) is None:
            raise
        return (), f"none: {way}"
    return files, ", ".join(map(str, files))
