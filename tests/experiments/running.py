"""Processes of this machine, as Linux's /proc tells of them, and waiting for what they do."""

import os
import time
from pathlib import Path

PARENT, SESSION = 1, 3  # columns of `stat`
PATIENCE = 100  # seconds in which something happens, on a busy machine


def read(pid, file):
    """A file of a process; nothing where it is gone."""
    try:
        return Path("/proc", str(pid), file).read_bytes()
    except OSError:
        return b""


def stat(pid):
    """Of a process, its state, parent, group and session; nothing where it is gone."""
    return read(pid, "stat").rpartition(b")")[2].decode().split()


def alive(pid):
    """Whether a process runs, and is no zombie."""
    return "".join(stat(pid)[:1]) not in ("", "Z", "X")


def stats():
    """{process: what `stat` tells} of all."""
    return {int(name): told for name in filter(str.isdigit, os.listdir("/proc")) if (told := stat(name))}


def processes(column, number):
    """All that run, of which a column of `stat` says a number."""
    return {pid for pid, told in stats().items() if told[0] not in "ZX" and int(told[column]) == number}


def descendants(pid):
    """Processes below a process, of any generation."""
    parents = {child: int(told[PARENT]) for child, told in stats().items()}
    below, found = {pid}, set()
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    return found


def spawned(pids):
    """Those of some processes that multiprocessing has spawned to run ranks."""
    return {pid for pid in pids if b"spawn_main" in read(pid, "cmdline")}


def shell(text):
    return ["sh", "-c", text]


def wait_for(condition, what="event"):
    deadline = time.monotonic() + PATIENCE
    while not (result := condition()):
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)
    return result
