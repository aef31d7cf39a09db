"""A bar for what takes minutes."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn


def progress_bar(console: Console, *more: ProgressColumn, **settings: Any) -> Progress:
    """A bar that is gone at the end of its block; none where the console is quiet or no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), *more)
    hidden = console.quiet or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=hidden, **settings)
