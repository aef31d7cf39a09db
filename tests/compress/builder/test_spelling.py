"""Whole numbers as users give them."""

import numpy as np
import pytest

from gradwire.compress.builder.spelling import whole_number


@pytest.mark.parametrize("given", [8, np.int64(8), np.uint8(8)])
def test_numpy_s_whole_numbers_become_python_s(given):
    assert type(whole_number(given, "every is a number of steps")) is int


@pytest.mark.parametrize("given", [0, 9, 2.0, "2", None, np.float32(2)])
def test_what_is_none_in_range_is_refused_with_the_value(given):
    with pytest.raises(ValueError, match=r"ranks are from 1 to 8; got .*"):
        whole_number(given, "ranks are from 1 to 8", most=8)
