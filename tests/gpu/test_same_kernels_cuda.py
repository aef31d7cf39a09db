"""Ranks on a GPU run an operation on one kernel backend, or are refused."""

import pytest
import torch

from gradwire import kernels

from ..ddp_core.averaging.test_same_kernels import SPECS, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
OPERATIONS = {SPECS[0]: "orthogonalize", SPECS[1]: "sign_pack"}


def trained_on_a_gpu(rank, world_size, given, spec, api):
    torch.cuda.set_device(0)
    return trained(rank, world_size, given, spec, api, "cuda", OPERATIONS[spec])


@pytest.mark.parametrize("api", ["own", "attach"])
@pytest.mark.parametrize("spec", OPERATIONS)
def test_requested_backends_that_differ_are_refused_on_all_ranks(ranks, spec, api):
    given = ["triton,reference", "reference"]
    for failure in ranks.run(trained_on_a_gpu, 2, given, spec, api, expect_errors=True, timeout=200):
        assert "the ranks were set up differently" in failure.message
        assert "rank 0 has triton (by use_backend), rank 1 has reference (by use_backend)" in failure.message


@pytest.mark.parametrize("api", ["own", "attach"])
@pytest.mark.parametrize("spec", OPERATIONS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("lacking cuda,triton", "reference"),
        ("lacking cuda", "triton"),
        ("reference", "reference"),
        ("triton,reference", "triton"),
    ],
)
def test_automatic_choices_follow_what_another_rank_has(ranks, spec, api, given, expected):
    first, second = ranks.run(trained_on_a_gpu, 2, [None, given], spec, api, timeout=200)
    assert all(map(torch.equal, first[0], second[0]))
    assert [first[2], second[2]] == [expected] * 2
    if kernels.operations()[OPERATIONS[spec]].chosen("cuda") != expected:
        said = [line for line in first[1] if f"runs on the kernel backend {expected}" in line]
        assert len(said) == 1
        assert "since ranks [1] have no better one" in said[0]
    assert not any("runs on the kernel backend" in line for line in second[1])
