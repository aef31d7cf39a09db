"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of prctl(2)


def dying_with(parent: int) -> Callable[[], None]:
    """What a child calls so that the kernel kills it when process `parent`, which started it, dies in whatever way.

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
