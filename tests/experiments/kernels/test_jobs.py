import pytest
import torch

from gradwire.experiments.kernels.cases import DTYPES
from gradwire.experiments.kernels.check import difference, kept, outcome
from gradwire.experiments.kernels.job import Output

from .given import CPU, EVERY, SIZE, named


def made(case, dtype="fp32", size=SIZE):
    return case.make(size, DTYPES[dtype], CPU)


PER_ELEMENT = {  # bytes, by hand, of the cheapest way; tests/kernels/test_traffic.py counts those of other operations
    "gather_scaled": 4 + 4,
    "sign_unpack_mean:voters=8": 8 / 8 + 4 + 8 * 4 / 1024,
    "dequantize_mean:bits=4": 4 / 2 + 4 + 4 * 4 / 128,
    "powersgd:rank=4": 28,
}


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_floors_are_those_of_the_cheapest_way(name):
    job = made(named(name), size=2**20)
    assert job.floor_bytes / 2**20 == pytest.approx(PER_ELEMENT[name], rel=1e-4)


@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=lambda each: getattr(each, "name", each))
def test_torch_s_operators_do_the_same_job(case, dtype, numbers):
    job = made(case, dtype)
    expected = kept(outcome(job, numbers, "reference"))
    job.run = job.run_baseline
    found = outcome(job, numbers, "reference")
    if case.name == "select_largest":
        order = found[0].values[0].argsort()
        found = [*(Output(each.name, each.values[:, order]) for each in found[:2]), found[2]]
    if buffers := getattr(job.run_baseline, "__self__", None):
        found = [by_rows(buffers, each) for each in found]
    pairs = [pair for pair in zip(expected, found, strict=True) if pair[1] is not None]
    assert pairs
    for wanted, got in pairs:
        exact = not got.values.is_floating_point()
        assert not difference(wanted, Output(got.name, got.values, exact)), got.name


def by_rows(buffers, output):
    """What the baseline left in factors of its own, in the order of ours; None where it does not do so."""
    factors = {"p": buffers.torch_p, "q": buffers.torch_q}
    if output.name in factors:
        return Output(output.name, torch.cat([each.T.reshape(-1) for each in factors[output.name]]))
    if output.name in ("grad", "residual"):
        return output
    if output.name == "projection":
        firsts = zip(buffers.torch_p, buffers.factors.left(buffers.first_p), strict=True)
        return Output(output.name, torch.cat([(first @ p @ p.T).view(-1) for p, first in firsts]))
    return None
