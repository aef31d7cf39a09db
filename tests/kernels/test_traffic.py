"""What Triton's kernels load and store: no more than the floor that `gradwire kernels` measures them by."""

import pytest
import torch

from gradwire import kernels
from gradwire.experiments.kernels.cases import CASES, DTYPES
from gradwire.experiments.kernels.heavy_tail import HeavyTail
from gradwire.kernels import triton_kernels

from ..traffic import Counted

SIZE = 1 << 17
CPU = torch.device("cpu")
ONE_PASS = (
    "cast_scaled",
    "sign_pack",
    "sign_unpack_mean",
    "quantize_blocks",
    "dequantize_mean",
)  # others: tests/ddp_core/memory/test_traffic.py
EVERY = [(case, dtype) for case in CASES if case.name.startswith(ONE_PASS) for dtype in case.dtypes]

pytestmark = pytest.mark.skipif(not triton_kernels.INTERPRETED, reason="loads and stores are those of the interpreter")


def moved(case, dtype, monkeypatch):
    """Bytes an element that a job moves by Triton's kernels, and its floor."""
    job = case.make(SIZE, DTYPES[dtype], CPU)
    job.refill(HeavyTail(SIZE, CPU))
    counted = Counted(monkeypatch)
    with kernels.use_backend("triton"), counted:
        job.run()
    assert counted.by_kernel
    assert not counted.by_operator
    return counted.bytes / SIZE, job.floor_bytes / SIZE


@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_kernels_load_and_store_what_their_floor_counts(case, dtype, monkeypatch):
    found, floor = moved(case, dtype, monkeypatch)
    assert found == pytest.approx(floor, rel=1e-3)
