"""The native backend as a whole: instruction sets, residuals, and what is refused."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import native

from ..gpu.cases import numbers
from .native_given import LARGE, needs_native
from .test_residual import ENCODERS, WIDE, beside_and_in_place

pytestmark = needs_native


def test_the_best_level_comes_first_and_an_unknown_one_is_not_chosen():
    assert native.library().levels()[-1] == "baseline"
    assert not native.library().choose_level("mmx")


NATIVE = {name: encode for name, encode in (ENCODERS | WIDE).items() if not name.startswith("quantization")}


@pytest.mark.parametrize(("size", "offset"), [(200_003, 1), (LARGE, 0), (LARGE, 1)])
@pytest.mark.parametrize("encode", NATIVE.values(), ids=NATIVE)
def test_a_residual_written_beside_the_old_one_is_that_written_over_it(level, threads, encode, offset, size):
    if encode is NATIVE["products of rank 33"]:
        offset = 0  # these are torch's, which on some processors round by where numbers lie
    with kernels.use_backend("native", "reference"):
        found, expected = beside_and_in_place(encode, numbers(size), offset)
    assert all(map(torch.equal, found, expected))
