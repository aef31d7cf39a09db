"""The buckets of a memory inside one of DDP's: among whom their rounds go, and what a swap leaves whole."""

from types import SimpleNamespace

import torch

from gradwire.compress import Layout, Ranks, compressor
from gradwire.ddp_core.averaging.segments import scopes_of_rounds, slice_of
from gradwire.ddp_core.memory.model_memory import ModelMemory

CPU = torch.device("cpu")
LAYOUT = Layout(("a", "b", "c"), ((2,), (3,), (2, 2)), torch.float32, CPU, Ranks(2))


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
