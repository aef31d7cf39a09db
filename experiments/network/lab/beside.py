"""Work in a thread beside a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event


@contextmanager
def beside(work: Callable[[Event], None], name: str) -> Iterator[None]:
    """Run `work` in a thread until the block ends and sets its event. Raises what `work` raises."""
    stop = Event()
    with ThreadPoolExecutor(1, name) as pool:
        running = pool.submit(work, stop)
        try:
            yield
        finally:
            stop.set()
            running.result()
