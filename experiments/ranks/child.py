"""A command as a process of its own, which ends with this one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .stopping import killed_with

GRACE_SECONDS = 10.0  # to end its ranks and to take down what it has set up
LAST_LINES = 12  # of what a failed command wrote
LINE = re.compile(r"(?:(\[rank\d+\]:) ?)?(.*)")  # with the rank that torch puts before a traceback
TRACEBACK, LAUNCHER = "Traceback (most recent call last)", "ChildFailedError"  # the second is torchrun's


class CommandFailure(RuntimeError):
    """A command ended with an error, took too long or left no result; the message has what it wrote last."""


def run_to_end(
    shown: str, command: Sequence[str], limit: float, written: Path, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command for at most `limit` seconds, with its output in the file `written`.

    Raises CommandFailure, which names the command by what is `shown`. Whatever happens, what the command started is ended,
    by the kernel where this process is killed.
    """
    with written.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            preexec_fn=killed_with(os.getpid()),
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    if code != 0:
        why = f"took longer than {limit:g} s" if code is None else f"ended with exit code {code}"
        last = _failure(written.read_text(errors="replace").strip().splitlines())[-LAST_LINES:]
        raise CommandFailure("\n".join([f"{why}: {shown}", *last]))


def _failure(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of the rank that raised first, up to its last exception; all lines if no rank raised.

    The other ranks' exceptions often follow from that one, and torchrun adds a long one of its own.
    """
    of_ranks, ends, raising = dict[str, list[str]](), dict[str, int](), set[str]()
    for line in lines:
        rank, text = LINE.fullmatch(line).groups("")  # type: ignore[union-attr]  # it matches every line
        mine = of_ranks.setdefault(rank, [])
        mine.append(text)
        if text.startswith(TRACEBACK):
            raising.add(rank)
        elif rank in raising and text and not text[0].isspace():
            raising.remove(rank)
            ends |= {} if LAUNCHER in text else {rank: len(mine)}
    first = next(iter(ends), None)
    return lines if first is None else of_ranks[first][: ends[first]]


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt what still runs, so that it can end its own; then, or at once when interrupted again, kill its session."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # nothing is left, as it should be
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # an interrupt amid a wait makes Popen wait for ever
            process.wait(GRACE_SECONDS)
