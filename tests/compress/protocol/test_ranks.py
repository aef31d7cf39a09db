"""Requests among the ranks of a host, and among the hosts."""

import dataclasses
from typing import get_args

import pytest
import torch

from gradwire.compress import (
    BFloat16,
    Float16,
    Ranks,
    ReduceScatter,
    Simulation,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    simulate,
    together,
)
from gradwire.compress.protocol.requests import Request

from ..given import gradients, layout, mean

SCOPES = ("all", "host", "across")
TOPOLOGIES = [(1, 1), (2, 1), (2, 2), (6, 1), (6, 2), (6, 3), (6, 6)]  # (ranks, ranks a host)


def peers(scope, rank, world_size, ranks_per_host):
    """The definition: all; those of one quotient; those of one remainder."""
    same = {
        "all": lambda other: True,
        "host": lambda other: other // ranks_per_host == rank // ranks_per_host,
        "across": lambda other: other % ranks_per_host == rank % ranks_per_host,
    }[scope]
    return [other for other in range(world_size) if same(other)]


def given(world_size, *shape):
    generator = torch.Generator().manual_seed(world_size)
    return [torch.randn(shape, generator=generator) for _ in range(world_size)]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("world_size", "ranks_per_host"), TOPOLOGIES)
class TestReplies:
    def test_ranks_name_the_members_of_a_scope(self, world_size, ranks_per_host, scope):
        for rank in range(world_size):
            within = Ranks(world_size, rank, ranks_per_host)
            assert list(within.members(scope)) == peers(scope, rank, world_size, ranks_per_host)

    @pytest.mark.parametrize("op", ["mean", "sum"])
    def test_an_all_reduce_is_over_the_members(self, world_size, ranks_per_host, scope, op):
        tensors = given(world_size, 5)
        replies = simulate([all_reduce(tensor.clone(), op, scope) for tensor in tensors], ranks_per_host)
        for rank, reply in enumerate(replies):
            group = torch.stack([tensors[peer].double() for peer in peers(scope, rank, world_size, ranks_per_host)])
            torch.testing.assert_close(reply.double(), getattr(group, op)(0), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("op", ["mean", "sum"])
    def test_a_reduce_scatter_gives_each_member_its_row(self, world_size, ranks_per_host, scope, op):
        count = len(peers(scope, 0, world_size, ranks_per_host))
        tensors = given(world_size, count, 2, 3)
        replies = simulate([reduce_scatter(tensor.clone(), op, scope) for tensor in tensors], ranks_per_host)
        for rank, reply in enumerate(replies):
            group = peers(scope, rank, world_size, ranks_per_host)
            rows = torch.stack([tensors[peer][group.index(rank)].double() for peer in group])
            torch.testing.assert_close(reply.double(), getattr(rows, op)(0), rtol=0, atol=1e-6)

    def test_gathers_and_exchanges_are_among_the_members(self, world_size, ranks_per_host, scope):
        count = len(peers(scope, 0, world_size, ranks_per_host))
        tensors = given(world_size, count, 3)
        gathered = simulate([all_gather(tensor, scope) for tensor in tensors], ranks_per_host)
        exchanged = simulate([all_to_all(tensor, scope) for tensor in tensors], ranks_per_host)
        for rank in range(world_size):
            group = peers(scope, rank, world_size, ranks_per_host)
            assert torch.equal(gathered[rank], torch.stack([tensors[peer] for peer in group]))
            assert torch.equal(exchanged[rank], torch.stack([tensors[peer][group.index(rank)] for peer in group]))


@dataclasses.dataclass(frozen=True)
class TwoLevel:
    """The mean: summed within each host, then across hosts, a shard a rank; then gathered within the host."""

    def init(self, layout):
        return layout

    def reduce(self, grad, state, residual=None):
        members = len(state.ranks.members("host"))
        padded = torch.nn.functional.pad(grad, (0, -grad.numel() % members))
        shard = yield from reduce_scatter(padded.view(members, -1), scope="host")
        shard = yield from all_reduce(shard, scope="across")
        whole = yield from all_gather(shard, scope="host")
        return whole.view(-1)[: grad.numel()]


@pytest.mark.parametrize(("world_size", "ranks_per_host"), TOPOLOGIES)
@pytest.mark.parametrize("wrapped", [TwoLevel(), Float16(TwoLevel()), BFloat16(TwoLevel())], ids=["32", "fp16", "bf16"])
def test_a_two_level_program_gives_the_mean(world_size, ranks_per_host, wrapped):
    within = layout((7, 3), (2,), world_size=world_size, per_host=ranks_per_host)
    tensors = gradients(within)
    replies = Simulation(wrapped, within).step(tensors)
    tolerance = 1e-6 if isinstance(wrapped, TwoLevel) else 4 * torch.finfo(wrapped.dtype).eps
    assert all(torch.equal(reply, replies[0]) for reply in replies)
    torch.testing.assert_close(replies[0], mean(tensors), rtol=tolerance, atol=tolerance)


def test_what_differs_in_scope_travels_apart():
    program = together(*(all_reduce(torch.ones(2), scope=scope) for scope in (*SCOPES, "host")))
    requests = [next(program)]
    while len(requests) < 3:
        requests.append(program.send(requests[-1].tensor))
    assert [(request.scope, request.tensor.numel()) for request in requests] == [("all", 2), ("host", 4), ("across", 2)]


def test_an_empty_reduce_scatter_is_no_round():
    assert simulate([reduce_scatter(torch.empty(1, 0, 4))])[0].shape == (0, 4)


class TestErrors:
    @pytest.mark.parametrize("kind", get_args(Request))
    def test_a_request_of_an_unknown_scope_is_refused_wherever_it_is_made(self, kind):
        with pytest.raises(ValueError, match=r"the scope of .* is 'all' or 'host' or 'across' or 'self', got 'rack'"):
            kind(torch.ones(1, 1), scope="rack")

    def test_a_request_of_an_unknown_op_is_refused_wherever_it_is_made(self):
        with pytest.raises(ValueError, match="the op of ReduceScatter is 'mean' or 'sum', got 'max'"):
            ReduceScatter(torch.ones(1, 1), "max")
        with pytest.raises(ValueError, match="the op of AllReduce is 'mean' or 'sum' or 'max', got 'avg'"):
            next(all_reduce(torch.ones(1), "avg"))

    @pytest.mark.parametrize("ranks_per_host", [0, -1, 4, 12])
    def test_ranks_that_do_not_fill_hosts_are_refused(self, ranks_per_host):
        with pytest.raises(ValueError, match=f"divides the number of ranks, 6; got {ranks_per_host}"):
            Ranks(6, per_host=ranks_per_host)

    def test_a_reduce_scatter_needs_a_row_for_each_member(self):
        with pytest.raises(RuntimeError, match="ReduceScatter over 2 ranks needs a row for each"):
            simulate([reduce_scatter(torch.ones(4, 3), scope="host") for _ in range(4)], per_host=2)


@pytest.mark.parametrize("wrapper", [Float16, BFloat16])
def test_sixteen_bits_overflow_only_where_the_mean_does(wrapper):
    within = layout((12,), world_size=6, per_host=3)
    largest = 0.9 * torch.finfo(wrapper.dtype).max
    replies = Simulation(wrapper(TwoLevel()), within).step([torch.full((12,), largest) for _ in range(6)])
    assert all(reply.isfinite().all() for reply in replies)
    infinite = Simulation(wrapper(TwoLevel()), within).step([torch.full((12,), torch.inf) for _ in range(6)])
    assert not any(reply.isfinite().any() for reply in infinite)


def test_a_gradient_beyond_float16_is_not_cut_on_any_level():
    within = layout((12,), world_size=6, per_host=3)
    replies = Simulation(Float16(TwoLevel()), within).step([torch.full((12,), 1e5) for _ in range(6)])
    assert all(reply.isinf().all() for reply in replies)
