"""The arguments of torch's class: near misses, which of two names of one thing counts, and what is trained."""

import pytest
import torch.distributed as dist
from torch import nn

from gradwire.ddp_core.torch_compat.arguments import Arguments, states, trained

from ..errors import warned


def test_an_unknown_argument_is_told_the_nearest_one_ours_included():
    given = Arguments.given([], {"find_unused_parameters": True}, ["compressor"])
    assert given.find_unused_parameters
    for name, near in (("static_grpah", "static_graph"), ("compresor", "compressor")):
        with pytest.raises(TypeError, match=rf"no argument '{name}' \(did you mean '{near}'\?\)"):
            Arguments.given([], {name: 1}, ["compressor"])


@pytest.mark.parametrize(
    ("given", "each_forward", "at_start"),
    [
        ({}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": False}, False, True),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
    ],
)
def test_the_newer_name_of_two_counts_and_the_older_one_alone_says_no_to_a_copy_at_the_start(
    given, each_forward, at_start
):
    arguments = Arguments(**given)
    assert (arguments.sync_buffers, arguments.sync_buffers_at_start) == (each_forward, at_start)
    with warned() as told:
        arguments.warn()
    assert ["broadcast_buffers" in each for each in told] == [True] * ("broadcast_buffers" in given)


def test_without_a_group_one_has_to_be_made_first():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="there is no process group yet"):
        Arguments().groups()


def test_groups_that_buckets_go_over_in_turn_have_the_same_ranks(group):
    assert Arguments().groups() == [group]
    assert Arguments(process_group=(group, group)).groups() == [group, group]
    with pytest.raises(ValueError, match="process_group is an empty list"):
        Arguments(process_group=[]).groups()


def test_the_caps_of_buckets_are_a_list_before_they_are_one_size():
    mebibyte = 1024 * 1024
    assert Arguments().rules().caps == [mebibyte, 25 * mebibyte]
    assert Arguments(bucket_cap_mb=2).rules().caps == [2 * mebibyte]
    assert Arguments(bucket_cap_mb=2, bucket_cap_mb_list=[1, 3]).rules().caps == [mebibyte, 3 * mebibyte]


class Words(nn.Module):
    """Two layers that share a weight, an embedding of sparse gradients, a frozen layer, and one that is ignored."""

    _ddp_params_and_buffers_to_ignore = ("own.weight", "norm.running_mean")

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.first, self.second, self.own = (nn.Linear(2, 2, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2, affine=False)


def test_each_parameter_is_trained_once_unless_frozen_or_ignored():
    module = Words()
    named, sparse = trained(module)
    assert list(named) == ["table.weight", "first.weight"]
    assert sparse == [True, False]
    assert len(states(module, buffers=False)) == 3  # the frozen one, too
    assert len(states(module, buffers=True)) == 3 + 2


def test_a_module_without_anything_to_train_is_refused():
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        trained(nn.ReLU())
    with pytest.raises(RuntimeError, match="run a dummy forward pass"):
        trained(nn.LazyLinear(2))
