"""Loads and stores of Triton's kernels: the floor of `gradwire kernels`, or what docs/benchmarks/kernels.md says."""

import re
from pathlib import Path

import pytest
import torch

from gradwire import kernels
from gradwire.experiments.kernels.cases import CASES, DTYPES
from gradwire.experiments.kernels.heavy_tail import HeavyTail
from gradwire.kernels import triton_kernels

from ..traffic import Counted

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "kernels.md"
ROW = re.compile(r"^\| `([^`]+)` \| ([\d.]+) \| ([\d.]+) \| [^|]+ \|$", re.MULTILINE)
TABLE = {name: (float(floor), float(counted)) for name, floor, counted in ROW.findall(PAGE.read_text("utf-8"))}
SIZE, LARGE = 1 << 15, 1 << 17
LARGER = ("rotate_blocks", "select_largest", "low_rank", "orthogonalize", "powersgd")  # or what is loaded once counts
CPU = torch.device("cpu")
BY_PARTS = ("powersgd:rank=1", "powersgd:rank=4")
OF_TORCH = ("gather_scaled",)
ALIKE = ("sign_unpack_mean:voters=2", "sign_unpack_mean:voters=8", "dequantize_mean:bits=4")
COUNTED = [case for case in CASES if case.name not in (*BY_PARTS, *OF_TORCH, *ALIKE)]
EVERY = [(case, dtype) for case in COUNTED for dtype in case.dtypes if dtype != "fp16"]  # as wide as bf16

pytestmark = pytest.mark.skipif(not triton_kernels.INTERPRETED, reason="loads and stores are those of the interpreter")


def moved(case, dtype, monkeypatch):
    """Bytes an element that a job moves by Triton's kernels, and its floor; of bases and unit vectors, of a factor's."""
    size = LARGE if case.name.startswith(LARGER) else SIZE
    job = case.make(size, DTYPES[dtype], CPU)
    job.refill(HeavyTail(size, CPU))
    counted = Counted(monkeypatch)
    with kernels.use_backend("triton"), counted:
        job.run()
    assert counted.by_kernel
    factor = case.name.startswith(("orthogonalize", "normalize"))
    elements = job.inputs[0].numel() if factor else size
    return counted.bytes / elements, job.floor_bytes / elements


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_kernels_load_and_store_what_their_floor_counts_or_the_page_says(case, dtype, monkeypatch):
    found, floor = moved(case, dtype, monkeypatch)
    if case.name not in TABLE:
        assert found == pytest.approx(floor, rel=5e-3)
        return
    told_floor, told = TABLE[case.name]
    narrower = 4 - DTYPES[dtype].itemsize
    assert floor + narrower == pytest.approx(told_floor, abs=1e-3)
    assert found + narrower == pytest.approx(told, abs=0.1)
