"""Bytes that a step of a method moves, against docs/benchmarks/kernels.md: kernels, torch's operators, the verdict."""

import re
from pathlib import Path

import pytest
import torch

from gradwire import kernels
from gradwire.compress import Layout, Ranks, compressor
from gradwire.compress.protocol.requests import next_request
from gradwire.compress.simulate import STEADY, alike
from gradwire.ddp_core.memory.bucket_memory import BucketMemory
from gradwire.kernels import triton_kernels

from ...traffic import Counted

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks" / "kernels.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
TABLE = ROW.findall(PAGE.read_text("utf-8").partition("A test counts the loads and stores of a step")[2])
SHAPES = ((512, 128), (128, 512))
RANKS = 8
QUICK = ("powersgd:rank=4", "onebit")  # the interpreter is slow
ALIKE = ("powersgd:rank=32", "int4", "acp-powersgd")  # the kernels of another row
MARKS = dict.fromkeys(QUICK, ()) | dict.fromkeys(ALIKE, pytest.mark.thorough)

pytestmark = pytest.mark.skipif(not triton_kernels.INTERPRETED, reason="loads and stores are those of the interpreter")


def moved(spec, dtype, monkeypatch):
    """Bytes an element of the second step, from the gradient in the bucket to the average there."""
    layout = Layout(("first", "second"), SHAPES, dtype, torch.device("cpu"), Ranks(RANKS))
    memory = BucketMemory(compressor(spec), layout, STEADY)
    counted = Counted(monkeypatch)
    for step in (0, 1):
        before = counted.bytes
        flat = torch.randn(layout.numel, generator=torch.Generator().manual_seed(step)).to(dtype)
        program, reply = memory.reduce(flat, STEADY + step, watched=True), None
        with kernels.use_backend(
            "triton" if step else "reference"
        ):  # the interpreter is slow, and the first does not count
            while True:
                with counted:
                    request, _ = next_request(program, reply)
                if request is None:
                    break
                reply = alike(request, layout.ranks)
        memory.end_step(keep=True, any_rank_owes=False)
    return (counted.bytes - before) / layout.numel


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    ("spec", "wide", "narrow"),
    [pytest.param(*row, marks=MARKS.get(row[0], pytest.mark.slow), id=row[0]) for row in TABLE],
)
def test_a_step_moves_what_the_page_says(spec, wide, narrow, dtype, monkeypatch):
    told = float(wide if dtype == torch.float32 else narrow)
    assert moved(spec, dtype, monkeypatch) == pytest.approx(told, abs=0.3)


def test_the_page_has_such_a_table():
    powersgd = {"powersgd:rank=4", "powersgd:rank=32", "powersgd:rank=4,payload=int8", "acp-powersgd"}
    assert {row[0] for row in TABLE} == powersgd | {"topk:ratio=0.01", "int8", "int4", "onebit", "chunktopk", "randomk"}
