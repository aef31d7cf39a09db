"""Python code that runs as a script would, in a process forked from one that has imported torch.

`Script` runs a text. `Python` is a program for commands that start Python themselves, such as torchrun.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Listener, wait
from pathlib import Path
from threading import Thread

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


PROGRAM = """#!{python} -SE
import os, sys
from multiprocessing.connection import Client

with Client({address!r}) as connection:
    connection.send((sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()))
    code = connection.recv()
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Python:
    """A program at `path` that does with its arguments what Python does: `[-u] FILE ...` or `[-u] -m MODULE ...`.

    A process that it stands for ends with it, and it ends as that process does.
    """

    def __init__(self, path):
        self.path, self._listener = str(path), Listener(None, "AF_UNIX")
        path.write_text(PROGRAM.format(python=sys.executable, address=self._listener.address))
        path.chmod(0o755)
        Thread(target=self._serve, daemon=True).start()

    def torchrun(self, *arguments):
        """The words of a torchrun and its variables, whose ranks are of this program too."""
        return [self.path, "-m", "torch.distributed.run", *arguments], {"PYTHON_EXEC": self.path}

    def _serve(self):
        while True:
            Thread(target=self._run, args=(self._listener.accept(),), daemon=True).start()

    @staticmethod
    def _run(connection):
        arguments, variables, folder, asking = connection.recv()
        files = [f"/proc/{asking}/fd/{descriptor}" for descriptor in range(3)]
        inputs = (arguments, variables, folder, files)
        process = multiprocessing.get_context(START).Process(target=_be_python, args=inputs, daemon=True)
        process.start()
        if process.sentinel not in wait([process.sentinel, connection]):  # the program was killed
            process.kill()
        process.join()
        with connection:
            try:
                connection.send(process.exitcode)
            except OSError:
                return


def _be_python(arguments, variables, folder, files):
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    for descriptor, file in enumerate(files):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND if descriptor else os.O_RDONLY), descriptor)
    sys.argv = arguments[1:] if arguments[0] == "-u" else arguments
    if sys.argv[0] == "-m":
        del sys.argv[0]
        sys.path.insert(0, folder)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
