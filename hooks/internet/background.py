"""An asyncio loop on a thread of its own, for code that waits on other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitTimeout
from typing import Any, TypeVar

T = TypeVar("T")
END = 5.0  # seconds in which what runs has to end


class Closed(RuntimeError):
    """The loop was closed while somebody waited for it."""


class Background:
    """A loop that runs until `close`."""

    def __init__(self) -> None:
        self._loop, self._closed = asyncio.new_event_loop(), False
        self._lock = threading.RLock()  # what is started before `close` is ended by it, and nothing starts after it
        self._thread = threading.Thread(target=self._run, name="gradwire-sites", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin to run a coroutine on the loop. Raises Closed after `close`."""
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise Closed("it was closed")

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the coroutine's result. Raises Closed, and TimeoutError after so many seconds."""
        return result_of(self.start(coroutine), seconds)

    def close(self) -> None:
        """End what runs, and the thread. Whoever waits for a result raises Closed."""
        with self._lock:
            if not self._closed:
                asyncio.run_coroutine_threadsafe(self._cancel(), self._loop)
            self._closed = True
        if threading.current_thread() is not self._thread:
            self._thread.join(END)

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=END)
        self._loop.call_soon(self._loop.stop)


def result_of(future: Future[T], seconds: float) -> T:
    """Wait for a future of a loop. Raises Closed where the loop ends first, TimeoutError where time does."""
    try:
        return future.result(seconds)
    except CancelledError as error:
        raise Closed("it was closed") from error
    except WaitTimeout as error:
        future.cancel()
        raise TimeoutError(f"it did not come within {seconds:g} s") from error
