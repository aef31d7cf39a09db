"""All Triton kernels compile for GPUs that are not here, as they are launched."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
QUICK = ["cuda:90 --once", "hip:gfx942 --once"]  # of each kernel one launch
MORE = ["cuda:90", *(f"cuda:{architecture} --once" for architecture in (75, 80, 86, 89, 100, 120))]
TARGETS = [*QUICK, *(pytest.param(target, marks=pytest.mark.thorough) for target in MORE)]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def start(target):
    """A process that compiles; outside Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton_compiler", *target.split()]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def compilers():
    """For each usual target a process, all at once; others are added when they are asked for."""
    running = {target: start(target) for target in QUICK}
    yield running
    for process in running.values():
        process.kill()


def kernels_in_the_tree():
    """The names of all kernels that are launched, by name or as one of two."""
    folder = ROOT / "kernels" / "triton_kernels"
    text = "\n".join(file.read_text() for file in folder.glob("*.py"))
    launched = re.findall(r"^ +(?!kernel\b)(\w+)\[.+\]\(", text, re.MULTILINE)
    return {*launched, *re.findall(r"\((\w+), \w+\(rank(?:, grad.device)?\)\)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.timeout(300)
def test_every_kernel_compiles_and_keeps_to_registers(compilers, target):
    if target not in compilers:
        compilers[target] = start(target)
    process = compilers[target]
    output, errors = process.communicate()
    print(output)
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row for row in rows if row["spills"]] == []
    assert process.returncode == 0, errors[-3000:]
    assert {row["kernel"] for row in rows} >= kernels_in_the_tree()
    if any(row["spills"] is None for row in rows):
        pytest.skip("all compile, but spills were not looked at: there is no cuobjdump")


@pytest.mark.parametrize(
    ("capability", "kilobytes"),  # NVIDIA's CUDA programming guide, technical specifications by compute capability
    [((7, 5), 64), ((8, 0), 164), ((8, 6), 100), ((8, 9), 100), ((9, 0), 228), ((10, 0), 228), ((12, 0), 100)],
)
def test_two_programs_of_the_most_ranks_share_a_multiprocessor(monkeypatch, capability, kilobytes):
    dots = pytest.importorskip("gradwire.kernels.triton_kernels.low_rank_dots")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", sum(capability))  # of each its own: what is known of a device is remembered
    ahead = dots.dots_by_rows(65, device)[1]["num_stages"]
    shared = (
        48 * (ahead - 1) if capability >= (8, 0) else 16
    )  # KiB, as Triton 3.9 compiles it; before, no load is ahead
    assert 2 * (shared + 1) <= kilobytes
    assert dots.dots_by_rows(32, device)[1]["num_stages"] == dots.LEFT[2]
