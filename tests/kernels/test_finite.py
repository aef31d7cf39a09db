"""Whether numbers are finite, against numpy."""

import numpy
import pytest
import torch

from gradwire.kernels import all_finite

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SIZES = [1, 7, 8, 9, 1009]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, *SIZES])
def test_finite_numbers_are_finite_up_to_the_largest(dtype, size):
    limit = torch.finfo(dtype).max
    tensor = torch.linspace(-1, 1, size, dtype=torch.float64).mul_(limit).to(dtype)
    assert numpy.isfinite(tensor.double().numpy()).all()
    assert all_finite(tensor)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_element_anywhere_is_seen(dtype, size, bad):
    for place in {0, size // 2, size - 1}:
        tensor = torch.ones(size, dtype=dtype)
        tensor[place] = bad
        assert not all_finite(tensor)


def test_infinities_of_both_signs_do_not_cancel():
    assert not all_finite(torch.tensor([torch.inf, 0.0, -torch.inf]))


def test_denormal_numbers_are_finite():
    assert all_finite(torch.tensor([1e-45, -1e-45, 0.0, -0.0]))


def test_the_answer_is_a_boolean_scalar_on_the_device_of_the_tensor():
    for device in ("cpu", "meta"):
        for size in (0, 3):
            answer = all_finite(torch.zeros(size, device=device))
            assert answer.dtype == torch.bool
            assert answer.shape == ()
            assert answer.device.type == device
