"""What is known of a bucket: its name, which numbers a segment of it has, and how its programs end together."""

from datetime import timedelta

import pytest
import torch

from gradwire.compress import Dense, Layout, Ranks, compressor
from gradwire.compress.simulate import simulate
from gradwire.ddp_core.averaging.bucket_plan import (
    AllPending,
    all_done,
    labelled,
    places_in,
    reduce_apart,
    scopes_of_rounds,
    setup,
)
from gradwire.ddp_core.engine.lanes import FuturePending
from gradwire.ddp_core.memory.bucket_memory import BucketMemory

CPU = torch.device("cpu")
LAYOUT = Layout(("a", "b", "c"), ((2,), (3,), (2, 2)), torch.float32, CPU, Ranks(2))


def test_a_bucket_is_called_by_its_first_parameters():
    assert labelled(4, ("a", "b", "c")) == "bucket 4 (parameters a, b, c)"
    assert labelled(0, tuple("abcdef")) == "bucket 0 (parameters a, b, c and 3 more)"


@pytest.mark.parametrize("room", [None, torch.full((6,), torch.nan)])
def test_a_part_is_averaged_where_its_pieces_lie_and_nothing_else_is_touched(room):
    places = places_in(LAYOUT, ("c", "a"))
    assert places == ((5, 9), (0, 2))
    own = Layout(("c", "a"), ((2, 2), (2,)), torch.float32, CPU, Ranks(2))
    flats = [torch.arange(9.0) + 10 * rank for rank in range(2)]
    rooms = [None if room is None else room.clone() for _ in flats]
    memories = [BucketMemory(Dense(), own, 0) for _ in flats]
    parts = zip(memories, rooms, flats, strict=True)
    given = simulate([reduce_apart(memory, places, taken, flat, 0, False) for memory, taken, flat in parts])
    for rank, flat in enumerate(flats):
        assert given[rank] is flat
        assert flat[:2].tolist() == [5.0, 6.0]
        assert flat[2:5].tolist() == [2.0 + 10 * rank, 3.0 + 10 * rank, 4.0 + 10 * rank]
        assert flat[5:].tolist() == [10.0, 11.0, 12.0, 13.0]


def futures(count):
    return [torch.futures.Future() for _ in range(count)]


def test_all_parts_of_a_bucket_are_waited_for_and_the_error_of_any_is_theirs():
    buffer, limit = torch.zeros(3), timedelta(seconds=5)
    good, bad = futures(2)
    whole = all_done([FuturePending(good), FuturePending(bad)], buffer)
    good.set_result(torch.ones(1))
    assert not whole.future.done()
    bad.set_exception(ArithmeticError("on purpose"))
    for pending in (whole, AllPending([FuturePending(good), FuturePending(bad)])):
        with pytest.raises((ArithmeticError, RuntimeError), match="on purpose"):
            pending.wait(limit)
    both = futures(2)
    whole = all_done(list(map(FuturePending, both)), buffer)
    for future in both:
        future.set_result(buffer)
    assert whole.wait(limit) is buffer


def test_where_parameters_may_be_left_out_any_round_may_be_the_one_that_asks_all_ranks():
    method, layout = compressor("hosts:ranks=2+none"), Layout(("a",), ((8,),), torch.float32, CPU, Ranks(4, 0, 2))
    alone = scopes_of_rounds(method, layout, partial=False)
    asking = scopes_of_rounds(method, layout, partial=True)
    assert len(asking) == len(alone) + 1
    for place, scopes in enumerate(alone):
        assert {"all", *scopes} <= asking[place]
        assert {"all", *scopes} <= asking[place + 1]


def test_ranks_compare_compressor_step_shapes_and_where_asked_values():
    bucket = "with a first bucket of 3 parameters, 9 x torch.float32"
    assert setup(Dense(), 3, LAYOUT, None, partial=False) == f"none at step 3 {bucket}"
    unused = "and find_unused_parameters=True"
    assert (
        setup(Dense(), 3, LAYOUT, "their values x", partial=True) == f"none at step 3 {unused} {bucket}, their values x"
    )
