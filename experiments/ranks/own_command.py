"""The command line that starts gradwire in a process of its own, without the current folder on Python's path."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"  # Python 3.11 and later read it
# `-c` puts the current folder first, as an empty string
DROPPED = "import sys; sys.path[:1] = filter(None, sys.path[:1])"
CALLED = "from gradwire.__main__ import main; sys.exit(main())"


def own_command(*arguments: str) -> list[str]:
    """Return the words that run `gradwire ARGUMENTS` by this Python.

    `python -m` would import modules of the current folder, such as a user's random.py. Only a clone that was not
    installed, and that this process runs from, stays on the path.
    """
    spec = find_spec("gradwire")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parents[1]
    kept = [f"sys.path.insert(0, {str(root)!r})"] if root == Path.cwd() else []
    return [sys.executable, "-c", "; ".join([DROPPED, *kept, CALLED]), *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep the current folder off the path of Python processes that are started meanwhile (Python 3.11 and later)."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
