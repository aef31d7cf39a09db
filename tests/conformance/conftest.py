"""Processes in which torch's own tests run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = dict(os.environ)  # before test modules, and the packages that they import, add to it


class Runner:
    """A process in which cases run one after the other; what they print is kept out of sight."""

    def __init__(self, kind, device, **more):
        choice = {"GRADWIRE_CONFORMANCE": kind, "GRADWIRE_CONFORMANCE_DEVICE": device, "WORLD_SIZE": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.runner"],
            cwd=Path(__file__).parents[2],
            env={**ENVIRONMENT, **choice, **more},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, case):
        print(case, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs {case} died with exit code {self._process.wait(10)}"
        return json.loads(answer)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="module")
def outcome_of():
    """A function from a case, and how its process is started, to what the case does and details. A missing one skips."""
    started = {}

    def outcome(case, kind, device, **more):
        key = kind, device, *more.items()
        if key not in started:
            started[key] = Runner(kind, device, **more)
        answer = started[key].run(case)
        if answer["outcome"] == "missing":
            pytest.skip(answer["detail"])
        return answer["outcome"], answer["detail"]

    yield outcome
    for runner in started.values():
        runner.close()
