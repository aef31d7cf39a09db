"""The Makefile in a folder whose name has a space: every target calls the programs of that folder's environment."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"
PROGRAMS = ("python", "gradwire", "pytest", "ruff", "mypy")
RECORD = """#!/bin/sh
printf '%s' "$(basename "$0")" >> "{log}"
for word in "$@"; do printf ' <%s>' "$word" >> "{log}"; done
echo >> "{log}"
"""
CALLS = {  # the last program that a target calls, and the beginning of its arguments
    "compare": "gradwire <compare> <--link> <100mbit,none> <--steps> <2>",
    "docs": "python <-m> <sphinx>",
    "test": "python <-m> <pytest>",
    "test-all": "python <-m> <pytest>",
    "test-rest": "python <-m> <pytest>",
    "compiled": "python <-m> <pytest>",
    "fuzz": "python <-m> <tests.trials>",
    "gpu": "python <-m> <tests.gpu> <--out> <gpu-results>",
    "conformance": "python <-m> <pytest> <tests/conformance>",
    "lint": "ruff <format> <--check> <.>",
    "format": "ruff <format> <.>",
    "types": "mypy <--config-file> <{folder}/pyproject.toml> <--cache-dir> <{folder}/.mypy_cache> <--package> <gradwire>",
}


@pytest.fixture
def clone(tmp_path):
    """A folder with the Makefile and an environment whose programs note how they are called."""
    folder = tmp_path / "a clone"
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(MAKEFILE, folder)
    for name in ("pyproject.toml", "setup.py"):
        (folder / name).touch()
    for name in PROGRAMS:
        program = folder / ".venv" / "bin" / name
        program.write_text(RECORD.format(log=folder / "log"))
        program.chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    return folder


def make(folder, *words):
    """Call make there, without what the make that runs the tests was told: MAKEFLAGS, VENV and others."""
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["make", "-s", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("target", CALLS)
def test_a_target_works_in_a_folder_with_a_space(target, clone):
    make(clone, target, *(["ARGS=--steps 2"] if target == "compare" else []))
    called = (clone / "log").read_text().splitlines()[-1]
    assert called.startswith(CALLS[target].format(folder=clone))


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_environment_is_made_in_a_folder_with_a_space(clone):
    (clone / ".venv" / ".installed").unlink()
    make(clone, "compare")
    first, last = (clone / "log").read_text().splitlines()
    assert first.startswith("python <-m> <pip> <install>")
    assert first.endswith("<--editable> <.[dev]>")
    assert last.startswith("gradwire <compare>")
