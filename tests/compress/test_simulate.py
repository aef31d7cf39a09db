"""Programs of all ranks in lock step, without a process group."""

import dataclasses

import pytest
import torch

from gradwire.compress import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Scatter,
    Simulation,
    all_gather,
    all_reduce,
    all_to_all,
    compressor,
    dry_run,
    simulate,
)

from .given import gradients, layout


def yielding(*things):
    """A program that yields these as they are."""
    for thing in things:  # noqa: UP028  (an iterator of a tuple takes no replies)
        yield thing


def one_round(request):
    """A program of one request."""
    return (yield request)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_collective_replies_what_it_says(world_size):
    given = [torch.arange(world_size * 2.0).view(world_size, 2) + 10 * rank for rank in range(world_size)]
    stacked = torch.stack(given)
    for program, expected in (
        (lambda tensor: all_reduce(tensor), [stacked.double().mean(0).float()] * world_size),
        (lambda tensor: all_reduce(tensor, "sum"), [stacked.double().sum(0).float()] * world_size),
        (all_gather, [stacked] * world_size),
        (all_to_all, list(stacked.transpose(0, 1))),
        (lambda tensor: all_reduce(tensor, "max"), [stacked.max(0).values] * world_size),
        (lambda tensor: one_round(Broadcast(tensor, world_size - 1)), [given[-1]] * world_size),
        (lambda tensor: one_round(Gather(tensor, world_size - 1)), [*[stacked[:0]] * (world_size - 1), stacked]),
        (lambda tensor: one_round(Scatter(tensor, world_size - 1)), list(given[-1])),
    ):
        replies = simulate([program(tensor.clone()) for tensor in given])
        assert [reply.shape for reply in replies] == [right.shape for right in expected]
        assert all(torch.allclose(reply, right, rtol=1e-6) for reply, right in zip(replies, expected, strict=True))


def test_ranks_get_the_same_bits_in_tensors_of_their_own():
    for program in (all_reduce, all_gather):
        replies = simulate([program(torch.full((3,), 0.1 * rank)) for rank in range(3)])
        assert torch.equal(replies[0], replies[1])
        replies[0].fill_(9.0)
        assert not torch.equal(replies[0], replies[1])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (AllReduce(torch.ones(2)), AllGather(torch.ones(2))),
        (AllReduce(torch.ones(2)), AllReduce(torch.ones(3))),
        (AllReduce(torch.ones(2)), AllReduce(torch.ones(2, 1))),
        (AllReduce(torch.ones(2)), AllReduce(torch.ones(2), "sum")),
        (AllReduce(torch.ones(2)), AllReduce(torch.ones(2), scope="across")),
        (AllReduce(torch.ones(2)), AllReduce(torch.ones(2, dtype=torch.float64))),
        (AllReduce(torch.ones(2)), None),
        (None, AllToAll(torch.ones(2))),
    ],
    ids=["kind", "size", "shape", "operation", "scope", "dtype", "fewer rounds", "more rounds"],
)
@pytest.mark.parametrize("agreed", [0, 2])
def test_ranks_that_ask_for_different_things_are_told_what_each_asked_for(first, second, agreed):
    def program(last):
        for _ in range(agreed):
            yield from all_reduce(torch.ones(1))
        yield from yielding(*([] if last is None else [last]))

    with pytest.raises(RuntimeError, match="the ranks ask for different collectives") as error:
        simulate([program(first), program(second)])
    for request in (first, second):
        assert type(request).__name__ in str(error.value) or request is None


@pytest.mark.parametrize("request_type", [AllReduce, AllGather, AllToAll])
def test_an_empty_collective_is_refused(request_type):
    with pytest.raises(RuntimeError, match="empty collective"):
        simulate([yielding(request_type(torch.empty(2, 0))) for _ in range(2)])


@pytest.mark.parametrize("thing", [torch.ones(2), None, 3, "all_reduce", (AllReduce(torch.ones(1)),)], ids=str)
def test_a_program_that_yields_no_request_is_told_what_to_yield(thing):
    for run in (lambda: simulate([yielding(thing)] * 2), lambda: dry_run(Yielding(thing), layout((2,)))):
        with pytest.raises(TypeError, match="yields AllReduce, ReduceScatter, AllGather") as error:
            run()
        assert repr(thing) in str(error.value)


@dataclasses.dataclass(frozen=True)
class Yielding:
    thing: object

    def init(self, layout):
        return None

    def reduce(self, grad, state, residual=None):
        yield self.thing
        return grad


@pytest.mark.parametrize("rows", [1, 3])
def test_an_all_to_all_needs_a_row_for_each_rank(rows):
    with pytest.raises(RuntimeError, match="over 2 ranks needs a row for each"):
        simulate([all_to_all(torch.ones(rows, 4)) for _ in range(2)])


def test_a_simulation_leaves_the_gradients_as_they_are_and_a_copy_goes_its_own_way():
    within = layout((16, 12))
    simulation, given = Simulation(compressor("powersgd:rank=1"), within), gradients(within)
    before = [gradient.clone() for gradient in given]
    simulation.step(given)
    assert all(map(torch.equal, given, before))
    other = simulation.copy()
    first = [simulation.step(given)[0] for _ in range(2)]
    assert all(map(torch.equal, first, [other.step(given)[0] for _ in range(2)]))
