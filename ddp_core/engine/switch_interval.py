"""How soon a thread gets the interpreter from another one.

Backward runs Python for every gradient, lanes run Python between their kernels, and they share the interpreter's lock. Who
wants it waits for the switch interval until the other must give it away; before that, the other takes it again after each
kernel. Python's 5 ms are long for a backward with a hundred hooks.
"""

from __future__ import annotations

import sys
import threading
from weakref import WeakSet

SECONDS = 0.0001
_lock = threading.Lock()
_wanting: WeakSet[object] = WeakSet()
_before = sys.getswitchinterval()  # to restore when nobody wants a short one any more


def shorten(who: object) -> None:
    """Shorten the switch interval of this process, until `restore(who)`."""
    global _before
    with _lock:
        if not _wanting:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(SECONDS, _before))
        _wanting.add(who)


def restore(who: object) -> None:
    """Restore the interval, unless others still want a short one. A second call does nothing."""
    with _lock:
        if who in _wanting:
            _wanting.remove(who)
            if not _wanting:
                sys.setswitchinterval(_before)
