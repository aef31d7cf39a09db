"""Programs that share their rounds."""

import pytest
import torch

from gradwire.compress import (
    AllGather,
    AllReduce,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    simulate,
    together,
)


def driven(program, world_size=1):
    """The requests of a program when all ranks give the same, and its result."""
    requests, reply = [], None
    try:
        while True:
            request = next(program) if reply is None else program.send(reply)
            requests.append(request)
            reply = torch.stack([request.tensor] * world_size) if isinstance(request, AllGather) else request.tensor
    except StopIteration as stop:
        return requests, stop.value


def reducing(tensor, rounds, op="mean"):
    for _ in range(rounds):
        tensor = yield from all_reduce(tensor.clone(), op)
    return tensor


def test_requests_of_one_round_that_are_alike_travel_as_one_in_order():
    first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0])
    requests, results = driven(together(reducing(first, 1), reducing(second, 1)))
    assert [type(request) for request in requests] == [AllReduce]
    assert requests[0].tensor.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(map(torch.equal, results, [first, second]))


def test_as_many_collectives_as_the_longest_program_has_rounds():
    programs = [reducing(torch.full((rounds,), float(rounds)), rounds) for rounds in (1, 3, 0, 2)]
    requests, results = driven(together(*programs))
    assert [request.tensor.tolist() for request in requests] == [[1, 3, 3, 3, 2, 2], [3, 3, 3, 2, 2], [3, 3, 3]]
    assert [result.tolist() for result in results] == [[1], [3, 3, 3], [], [2, 2]]


@pytest.mark.parametrize(
    "others",
    [
        [all_reduce(torch.ones(2), "sum")],
        [all_reduce(torch.ones(2, dtype=torch.float16))],
        [all_gather(torch.ones(2))],
        [all_to_all(torch.ones(1, 2))],
        [all_gather(torch.ones(2)), all_to_all(torch.ones(1, 2)), all_reduce(torch.ones(2), "sum")],
    ],
    ids=["operation", "dtype", "gather", "to all", "all kinds"],
)
def test_what_differs_in_kind_operation_or_dtype_travels_apart(others):
    requests, _ = driven(together(all_reduce(torch.ones(3)), *others))
    assert len(requests) == 1 + len(others)
    assert [request.tensor.numel() for request in requests] == [3, *[2] * len(others)]


def test_nothing_to_do_yields_nothing():
    assert driven(together()) == ([], [])
    requests, results = driven(together(reducing(torch.ones(3), 0)))
    assert requests == []
    assert results[0].tolist() == [1.0, 1.0, 1.0]
    requests, results = driven(together(all_reduce(torch.empty(0)), all_reduce(torch.empty(0, 4))))
    assert requests == []
    assert [result.shape for result in results] == [(0,), (0, 4)]


@pytest.mark.parametrize("shapes", [[(2,), (3,)], [(2, 3), (), (4, 1)], [(), ()], [(1,)]], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("ask", [all_reduce, all_gather, all_to_all, reduce_scatter])
def test_requests_that_share_a_round_reply_as_if_alone(ask, shapes, world_size):
    rows = (world_size,) if ask in (all_to_all, reduce_scatter) else ()
    given = [[torch.randn(rows + shape, generator=seeded(rank)) for shape in shapes] for rank in range(world_size)]
    merged = simulate([together(*(ask(tensor.clone()) for tensor in tensors)) for tensors in given])
    for index in range(len(shapes)):
        alone = simulate([ask(tensors[index].clone()) for tensors in given])
        assert all(torch.equal(result[index], reply) for result, reply in zip(merged, alone, strict=True))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def waiting(name, closed):
    """A program of several rounds that says when it is closed."""
    try:
        yield from reducing(torch.ones(1), 3)
    finally:
        closed.append(name)


@pytest.mark.parametrize("moment", ["at the start", "after a round"])
def test_an_error_in_one_program_closes_the_others(moment):
    def failing():
        if moment == "after a round":
            yield from all_reduce(torch.ones(1))
        raise KeyError("mine")

    closed = []
    with pytest.raises(KeyError, match="mine"):
        driven(together(waiting("before", closed), failing(), waiting("after", closed)))
    assert closed == (["before"] if moment == "at the start" else ["before", "after"])


def test_closing_it_closes_all_its_programs():
    closed = []
    program = together(waiting("a", closed), waiting("b", closed))
    next(program)
    program.close()
    assert closed == ["a", "b"]
