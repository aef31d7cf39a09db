"""`make mutants`: makes each change in a copy of the tree, runs its tests there, and shows which changes no test noticed."""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from .changes import MUTANTS
from .mutant import ROOT

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "site", "*.egg-info", "results", "benchmarks")
PASSED, FAILED, TIMED_OUT = 0, 1, -1  # pytest's, and ours
FATES = {PASSED: "survived", FAILED: "killed", TIMED_OUT: "too slow"}


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, or of the tree without one."""

    what: str
    code: int
    seconds: float
    output: str

    @property
    def fate(self):
        """`killed` is a test that failed; one that hangs fails by its own time limit."""
        return FATES.get(self.code, f"code {self.code}")

    @property
    def by(self):
        """The test that failed."""
        found = re.findall(r"^FAILED \S*::(\S+)", self.output, re.MULTILINE)
        return f", by {found[0]}" if found else ""


def tested(what, tests, root, limit):
    """The outcome of some tests in a tree."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, output = TIMED_OUT, f"no end within {limit} s"
    return Outcome(what, code, time.monotonic() - began, output)


def tried(mutant, roots, limit):
    """The outcome of a mutant, in a tree that nobody else uses meanwhile."""
    root = roots.get()
    try:
        before, after = mutant.made_in(root)
        (root / mutant.file).write_text(after, "utf-8")
        try:
            return tested(mutant.what, shlex.split(mutant.tests), root, limit)
        finally:
            (root / mutant.file).write_text(before, "utf-8")
    finally:
        roots.put(root)


def copies(folder, count):
    """Trees to change, each whole but for what no test of a mutant reads."""
    roots = SimpleQueue()
    for number in range(count):
        root = Path(folder, str(number))
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        roots.put(root)
    return roots


def imported_from(root):
    """Where a test in a tree imports gradwire from."""
    code = "import gradwire.ddp_core; print(gradwire.ddp_core.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    return done.stdout.strip()


def unharmed(roots, pool, chosen, limit):
    """Whether the tests pass in a tree without a mutant; if not, a mutant that they fail with proves nothing."""
    root = roots.get()
    found = imported_from(root)
    if not found.startswith(str(root)):
        print(f"a copy of the tree in {root} imports gradwire from {found}: its changes would do nothing")
        return False
    wanted = dict.fromkeys(each.tests for each in chosen)
    results = list(pool.map(lambda tests: tested(tests, shlex.split(tests), root, limit), wanted))
    roots.put(root)
    for result in results:
        if result.code != PASSED:
            print(f"without a mutant pytest {result.what} ends with code {result.code}:\n{result.output[-3000:]}")
    return all(result.code == PASSED for result in results)


def main():
    """Try the mutants; 1 where one survived, 2 where the tests prove nothing."""
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those whose description or file contains this")
    parser.add_argument("--workers", type=int, default=2, help="how many at once")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of one")
    parser.add_argument("--skip-clean", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if options.only in f"{each.what} {each.file}"]
    with tempfile.TemporaryDirectory(prefix="gradwire-mutants-") as folder:
        roots, results = copies(folder, options.workers), []
        with ThreadPoolExecutor(options.workers) as pool:
            if not options.skip_clean and not unharmed(roots, pool, chosen, options.limit):
                return 2
            outcomes = pool.map(lambda each: tried(each, roots, options.limit), chosen)
            for mutant, result in zip(chosen, outcomes, strict=True):
                results.append(result)
                print(f"{result.fate:8}  {result.seconds:4.0f} s  {mutant.file}: {mutant.what}{result.by}", flush=True)
    survived = [result for result in results if result.fate != "killed"]
    print(f"{len(results)} mutants, {len(results) - len(survived)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
