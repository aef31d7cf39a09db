"""Replies that come late, and are NaN until then, change nothing of what is gathered, summed and averaged of shards."""

from datetime import timedelta
from itertools import zip_longest

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import gradwire
from gradwire.compress import compressors
from gradwire.compress.shards.reduction import shard_sum
from gradwire.compress.shards.weights import weight_gather

from ...late import Late
from .given import mesh_of, network, trained

LIMIT = timedelta(seconds=30)


def taken_by(check):
    """The methods that a check does not refuse."""
    taken = []
    for name in compressors():
        try:
            check(name)
        except ValueError:
            continue
        taken.append(name)
    return taken


GATHERED, SUMMED = taken_by(weight_gather), taken_by(shard_sum)
GATHERED.append("int4:send=weights")
EVERY = [{"gather": one, "reduce": other} for one, other in zip_longest(GATHERED, SUMMED, fillvalue="none")]
PAIRS = [("none", "none"), ("bf16", "bf16"), ("int4", "onebit"), ("int4:send=weights", "int8")]
OF_SHARDS = [{"gather": one, "reduce": other} for one, other in PAIRS]
TWO_LEVELS = [{"gather": "hosts:ranks=2+int4", "reduce": "hosts:ranks=2,inside=int8+int4"}]
OF_REPLICAS = [{"replicas": name} for name in ("none", "int8", "topk", "powersgd:rank=2")]


def in_time_and_late(rank, world_size, shape, asked):
    """Whether a training with late replies ends with the same bits, for each way to communicate."""
    return [ended(rank, shape, arguments, None) == ended(rank, shape, arguments, LIMIT) for arguments in asked]


def ended(rank, shape, arguments, limit):
    """The bits of the parameters after a training."""
    mesh = mesh_of(*shape) if len(shape) == 1 else init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, decorated = network(2, mesh), []

    def late(inner):
        decorated.append(Late(inner, limit))
        return decorated[-1]

    handle = gradwire.attach(model, **arguments, transport=late if limit else None)
    numbers = trained(model, rank, steps=3)
    handle.close()
    assert all(each.isfinite().all() for each in numbers.values())
    assert any(each.carried for each in decorated) == bool(limit)
    return {name: each.view(torch.int32).tolist() for name, each in numbers.items()}


@pytest.mark.parametrize(
    ("shape", "asked"),
    [
        ((2,), OF_SHARDS),
        ((4,), TWO_LEVELS),
        pytest.param((2,), EVERY, marks=pytest.mark.thorough),
        pytest.param(
            (2, 2),
            [*OF_REPLICAS, {"gather": "int8", "reduce": "int4", "replicas": "powersgd:rank=2"}],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["shards", "two levels", "every one", "replicas"],
)
def test_late_replies_change_no_bit(ranks, shape, asked):
    for same in ranks.run(in_time_and_late, torch.Size(shape).numel(), shape, asked, timeout=100):
        assert same == [True] * len(asked)


def test_every_codec_of_two_shots_is_taken():
    assert {"none", "int8", "onebit"} <= {*GATHERED} & {*SUMMED}
