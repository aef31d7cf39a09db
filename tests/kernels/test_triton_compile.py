"""All Triton kernels compile for GPUs that are not here, as they are launched."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ["cuda:90", "cuda:80", "hip:gfx942"]
SPILLED_BYTES = 256  # of a thread, at most: no kernel may live in local memory

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def compilers():
    """For each target a process that compiles, all at once; outside Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    running = {}
    for target in TARGETS:
        once = [] if target == TARGETS[0] else ["--once"]
        command = [sys.executable, "-m", "tests.kernels.triton_compiler", target, *once]
        running[target] = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    yield running
    for process in running.values():
        process.kill()


def kernels_in_the_tree():
    """The names of all kernels that are launched, by name or as one of two."""
    folder = ROOT / "kernels" / "triton_kernels"
    text = "\n".join(file.read_text() for file in folder.glob("*.py"))
    launched = re.findall(r"^ +(?!kernel\b)(\w+)\[.+\]\(", text, re.MULTILINE)
    return {*launched, *re.findall(r"\((\w+), \w+\(rank\)\)", text)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.timeout(300)
def test_every_kernel_compiles_and_keeps_to_registers(compilers, target):
    output, errors = compilers[target].communicate()
    assert compilers[target].returncode == 0, errors[-3000:]
    rows = [json.loads(line) for line in output.splitlines()]
    assert {row["kernel"] for row in rows} >= kernels_in_the_tree()
    assert [row for row in rows if (row["spilled_bytes"] or 0) > SPILLED_BYTES] == []
