"""Python code that runs as a script would, in a process forked from one that has imported torch."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .ranks import START

LIMIT = 110  # seconds that a script may take


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a script."""

    code: int
    out: str
    errors: str


class Script:
    """Runs `code` in `folder` with `variables` as its environment, from now on."""

    def __init__(self, code, *arguments, folder=".", variables=os.environ):
        self._output = tempfile.TemporaryDirectory()
        self._files = [Path(self._output.name, name) for name in ("out", "errors")]
        inputs = (code, [*map(str, arguments)], str(folder), dict(variables), self._files)
        self._process = multiprocessing.get_context(START).Process(target=_run, args=inputs, daemon=True)
        self._process.start()

    def said(self, what):
        """All that it has printed, once `what` is in it; "" where it ends without."""
        deadline = time.monotonic() + LIMIT
        while what not in (printed := self._files[0].read_text() if self._files[0].exists() else ""):
            if not self._process.is_alive() or time.monotonic() > deadline:
                return ""
            time.sleep(0.01)
        return printed

    @property
    def pid(self):
        return self._process.pid

    def interrupt(self):
        """As Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)

    def end(self):
        """Wait for the end, or kill a script that takes too long."""
        self._process.join(LIMIT)
        self._process.kill()
        self._process.join()
        with self._output:
            return Ended(self._process.exitcode, *(file.read_text() if file.exists() else "" for file in self._files))


def _run(code, arguments, folder, variables, files):
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
    sys.argv = ["script.py", *arguments]
    exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
