"""The buckets of a memory inside one of DDP's: which numbers each has, and among whom its rounds go."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.compress import Dense, Layout, Ranks, compressor
from gradwire.compress.simulate import simulate
from gradwire.ddp_core.averaging.segments import places_in, reduce_apart, scopes_of_rounds, slice_of
from gradwire.ddp_core.memory.bucket_memory import BucketMemory
from gradwire.ddp_core.memory.model_memory import ModelMemory

CPU = torch.device("cpu")
LAYOUT = Layout(("a", "b", "c"), ((2,), (3,), (2, 2)), torch.float32, CPU, Ranks(2))


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


def test_where_parameters_may_be_left_out_any_round_may_be_the_one_that_asks_all_ranks():
    method, layout = compressor("hosts:ranks=2+none"), Layout(("a",), ((8,),), torch.float32, CPU, Ranks(4, 0, 2))
    alone = scopes_of_rounds(method, layout, partial=False)
    asking = scopes_of_rounds(method, layout, partial=True)
    assert len(asking) == len(alone) + 1
    for place, scopes in enumerate(alone):
        assert {"all", *scopes} <= asking[place]
        assert {"all", *scopes} <= asking[place + 1]


def test_slices_of_a_loaded_state_cut_nothing_after_a_swap():
    memory = ModelMemory(compressor("int8"))
    memory.load_state_dict({"step": 1, "buckets": [["a"], ["b", "c"]], "parameters": {}})
    part = SimpleNamespace(layout=lambda layout: layout)
    part.bucket = SimpleNamespace(slices=[part])
    slice_of(memory, part, LAYOUT, {})
    memory.replace(compressor("powersgd"))
    assert memory.claims.split(LAYOUT.names) == [LAYOUT.names]
