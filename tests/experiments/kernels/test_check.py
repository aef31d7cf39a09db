import math

import torch

from gradwire.experiments.kernels.check import difference
from gradwire.experiments.kernels.job import Output


def test_a_result_is_right_up_to_the_rounding_of_sums_and_never_where_it_is_not_a_number():
    wanted = torch.linspace(-1, 1, 1001)
    for value, right in ((1e-6, True), (1e-2, False), (math.nan, False), (math.inf, False)):
        got = wanted.clone()
        got[500] += value
        assert (not difference(Output("x", wanted), Output("x", got))) == right
    one_bit = torch.nextafter(wanted, torch.tensor(2.0))
    assert not difference(Output("x", wanted), Output("x", one_bit))
    assert difference(Output("x", wanted, exact=True), Output("x", one_bit, exact=True))
