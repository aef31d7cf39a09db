import pytest
import torch

from gradwire.experiments.kernels.cases import DTYPES
from gradwire.experiments.kernels.check import difference, kept, outcome
from gradwire.experiments.kernels.job import Output

from .given import CPU, EVERY, SIZE, named


def made(case, dtype="fp32", size=SIZE):
    return case.make(size, DTYPES[dtype], CPU)


PER_ELEMENT = {  # bytes, by hand: read and written by the cheapest way there is, of float32 buckets
    "cast_scaled:to=fp16": 4 + 2,
    "cast_scaled:from=bf16": 2 + 4,
    "gather_scaled": 4 + 4,
    "sign_pack": 4 + 4 + 4 + 1 / 8 + 4 / 1024,
    "sign_unpack_mean:voters=2": 2 / 8 + 4 + 2 * 4 / 1024,
    "sign_unpack_mean:voters=4": 4 / 8 + 4 + 4 * 4 / 1024,
    "sign_unpack_mean:voters=8": 8 / 8 + 4 + 8 * 4 / 1024,
    "quantize_blocks": 4 + 4 + 4 + 1 + 4 / 128,
    "quantize_blocks:bits=4": 4 + 4 + 4 + 1 / 2 + 4 / 128,
    "quantize_blocks:bits=2": 4 + 4 + 4 + 1 / 4 + 4 / 128,
    "dequantize_mean:voters=4": 4 + 4 + 4 * 4 / 128,
    "dequantize_mean:bits=4": 4 / 2 + 4 + 4 * 4 / 128,
    "dequantize_mean:bits=2": 4 / 4 + 4 + 4 * 4 / 128,
    "rotate_blocks": 4 + 4,
    "rotate_blocks:block=1024": 4 + 4,
    "select_largest": 16,
    "scatter_mean:voters=4": 4 + 4 * 0.01 * 8,
    "powersgd:rank=1": 28,
    "powersgd:rank=4": 28,
    "powersgd:rank=32": 28,
    "low_rank_left:rank=4": 12,
    "low_rank_right:rank=4": 4,
    "low_rank_finish:rank=4": 12,
    "all_finite": 4,
}
NARROWER = {"sign_pack": 10.129, "select_largest": 14, "sign_unpack_mean:voters=8": 3.031, "all_finite": 2}


@pytest.mark.parametrize("name", PER_ELEMENT)
def test_floors_are_those_of_the_cheapest_way(name):
    job = made(named(name), size=2**20)
    assert job.floor_bytes / 2**20 == pytest.approx(PER_ELEMENT[name], rel=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NARROWER)
def test_floors_of_16_bit_gradients_keep_a_residual_of_32_bits(name, dtype):
    job = made(named(name), dtype, size=2**20)
    assert job.floor_bytes / 2**20 == pytest.approx(NARROWER[name], rel=1e-4)


def test_the_floors_of_factors_are_their_own_bytes():
    rows, columns = 2 * (1536 + 512 + 2048 + 512) + 512, 2 * (512 + 512 + 512 + 2048) + 512
    job = made(named("orthogonalize:rank=4"), size=6_553_600)
    assert job.floor_bytes == 2 * 4 * 4 * rows
    assert job.run.__self__.grad.numel() == 6_553_600
    assert made(named("normalize:rank=4"), size=6_553_600).floor_bytes == 2 * 4 * 4 * columns


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
