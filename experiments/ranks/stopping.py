"""The end of processes: on Ctrl-C and SIGTERM, and with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

PR_SET_PDEATHSIG = 1  # of prctl(2)
INTERRUPTED = 130  # the shell's exit code for Ctrl-C


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that goes, end the block as Ctrl-C does; what nohup has ignored stays so."""
    asked = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    previous = {each: signal.signal(each, _interrupt) for each in asked}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def killed_with(parent: int) -> Callable[[], None]:
    """Return a function for a child to call: the kernel then kills the child when its `parent` dies in any way.

    Prepared before the fork, as little may be done after it. Only Linux has this; elsewhere the call does nothing.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def ask() -> None:
        if prctl is None:
            return
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it has died meanwhile
            os._exit(1)

    return ask
