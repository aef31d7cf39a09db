"""What compressors remember moves by parameter name: through new buckets, checkpoints and swaps."""

import pytest
import torch

from gradwire.compress import ErrorFeedback, Simulation, Switch, compressor, simulate
from gradwire.compress.state import tree as states
from gradwire.compress.state.leaf import FlatLeaf, Versions
from gradwire.compress.state.tree import Chunk

from ..given import gradients, layout, placed

NAMES, SHAPES = ("a", "b", "c", "d"), ((16, 12), (5,), (9, 8), (3, 4, 4))
ODD = dict(zip(NAMES, SHAPES, strict=True))
# Every matrix and factor at a multiple of 64 bytes: the last bits of a product depend on alignment.
ALIGNED = {"a": (16, 24), "b": (16,), "c": (8, 24), "d": (24, 2, 8)}
ONE, TWO, OTHER, EACH = (NAMES,), (("a", "b"), ("c", "d")), (("d",), ("c", "a", "b")), (("d",), ("c",), ("b",), ("a",))


class Buckets:
    """A compressor over several buckets on simulated ranks."""

    def __init__(self, spec, groups, world_size=2, dtype=torch.float32, shapes=ODD):
        self.shapes = shapes
        self.compressor = compressor(spec)
        self.layouts = [
            layout(*(shapes[name] for name in names), names=names, world_size=world_size, dtype=dtype)
            for names in groups
        ]
        self.simulations = [Simulation(self.compressor, within) for within in self.layouts]

    def step(self, seed):
        """{parameter: average} for gradients that depend on seed, rank and parameter alone."""
        averages = {}
        for within, simulation in zip(self.layouts, self.simulations, strict=True):
            given = [
                torch.cat([gradients(layout(self.shapes[n]), seed * 100 + rank * 10 + ord(n))[0] for n in within.names])
                for rank in range(within.ranks.world_size)
            ]
            outs = simulation.step([gradient.to(within.dtype) for gradient in given])
            averages |= {name: view.reshape(-1) for name, view in within.views(outs[0]).items()}
        return averages

    def save(self, rank):
        entries = {}
        for simulation in self.simulations:
            entries |= states.save(simulation.states[rank])
        return entries

    def load(self, rank, entries):
        """What is owed to the next average of this rank."""
        owed = [states.load(simulation.states[rank], entries) for simulation in self.simulations]
        return {name: numbers for part in owed for name, numbers in part.items()}

    def held_back(self):
        """{parameter: mean over ranks of what is held back}."""
        total = {name: torch.zeros(torch.Size(shape).numel()) for name, shape in self.shapes.items()}
        for simulation in self.simulations:
            for state in simulation.states:
                for name, numbers in states.held_back(state).items():
                    total[name] += numbers.float() / len(simulation.states)
        return total


@pytest.mark.parametrize("after", [ONE, TWO, OTHER, EACH], ids=["one", "two", "other", "each"])
@pytest.mark.parametrize("before", [ONE, TWO], ids=["from one", "from two"])
@pytest.mark.parametrize(
    "spec", ["powersgd:rank=2", "bf16+powersgd:rank=1", "powersgd:rank=2,start_iter=1", "acp-powersgd:rank=2", "none"]
)
def test_in_new_buckets_every_parameter_goes_on_to_the_bit(spec, before, after):
    old, new, untouched = (Buckets(spec, groups, shapes=ALIGNED) for groups in (before, after, before))
    for step in range(3):
        assert old.step(step).keys() == untouched.step(step).keys()
    for rank in range(2):
        assert new.load(rank, old.save(rank)) == {}
    for simulation in new.simulations:
        for state in simulation.states:
            states.set_step(state, 3)
    for step in range(3, 6):
        expected, found = untouched.step(step), new.step(step)
        assert all(torch.equal(found[name], expected[name]) for name in NAMES)


@pytest.mark.parametrize("after", [ONE, TWO, OTHER, EACH], ids=["one", "two", "other", "each"])
@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1", "onebit:block=8", "onebit", "powersgd", "batched-powersgd", "randomk:block=16"]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_new_buckets_nothing_that_was_held_back_is_lost(spec, after, world_size):
    old, new = Buckets(spec, TWO, world_size), Buckets(spec, after, world_size)
    for step in range(3):
        old.step(step)
    owed = [new.load(rank, old.save(rank)) for rank in range(world_size)]
    expected, found = old.held_back(), new.held_back()
    for name in NAMES:
        total = found[name] + sum(part[name] / world_size for part in owed if name in part)
        assert torch.allclose(total, expected[name], atol=1e-6)


def test_entries_are_named_by_parameter_and_by_place_in_the_tree_with_the_parameter_s_shape():
    nested = ErrorFeedback(Switch({0: compressor("none"), 2: compressor("powersgd:rank=2,error_feedback=false")}))
    saved = states.save(nested.init(layout(*SHAPES, names=NAMES)))
    assert {name: sorted(fields) for name, fields in saved.items()} == {
        "a": ["inner.stages.1.q", "residual"],
        "b": ["residual"],
        "c": ["inner.stages.1.q", "residual"],
        "d": ["residual"],
    }
    assert all(fields["residual"].shape == ODD[name] for name, fields in saved.items())
    assert saved["a"]["inner.stages.1.q"].shape == (2, 12)


def test_a_q_of_another_rank_is_drawn_anew():
    within = layout((64, 32), names=["weight"])
    fresh = states.save(compressor("powersgd:rank=4").init(within))
    state = compressor("powersgd:rank=4").init(within)
    states.load(state, states.save(compressor("powersgd:rank=2").init(within)))
    assert torch.equal(states.save(state)["weight"]["inner.q"], fresh["weight"]["inner.q"])


def test_a_server_s_part_knows_the_parameters_it_touches():
    within = layout((4,), (6,), (3,), names=["x", "y", "z"], world_size=3)
    chunk = Chunk(within, 3, Versions(torch.arange(5.0)))
    saved = chunk.save("server")
    assert {name: (fields["server"].tolist(), int(fields["server.first"])) for name, fields in saved.items()} == {
        "x": ([0.0], 3),
        "y": ([1.0, 2.0, 3.0, 4.0], 0),
    }
    assert {name: numbers.tolist() for name, numbers in chunk.held_back().items()} == {
        "x": [0, 0, 0, 0],
        "y": [3, 6, 9, 12, 0, 0],
    }


def test_a_server_s_part_that_moved_is_owed_as_many_times_as_there_are_ranks():
    within = layout((4,), (6,), names=["x", "y"], world_size=2)
    saved = Chunk(within, 0, Versions(torch.arange(5.0))).save("server")
    here = Chunk(within, 5, Versions(torch.zeros(5)))
    owed = here.load("server", {**saved, "elsewhere": saved["x"]})
    assert {name: numbers.tolist() for name, numbers in owed.items()} == {"x": [0, 2, 4, 6], "y": [8, 0, 0, 0, 0, 0]}
    assert here.flat.count_nonzero() == 0


def test_a_program_that_is_closed_half_way_can_be_run_again():
    within = layout(*SHAPES, names=NAMES)
    built = compressor("powersgd:rank=2,error_feedback=false")
    ranks = [placed(within, rank=rank) for rank in range(2)]
    state, other = ([built.init(rank) for rank in ranks] for _ in range(2))
    for mine in state:
        program = built.reduce(gradients(within)[0], mine)
        next(program)
        program.close()
        states.set_step(mine, 0)
    given = gradients(within)
    found, expected = (
        simulate([built.reduce(g.clone(), s) for g, s in zip(given, those, strict=True)]) for those in (state, other)
    )
    assert torch.equal(found[0], expected[0])


def test_a_save_while_a_step_makes_room_for_its_numbers_has_those_from_before_it(monkeypatch):
    leaf, saved = FlatLeaf(), []
    leaf.versions = Versions(torch.ones(3))
    leaf.snapshot()  # somebody has the numbers, so the step may not write over them
    make = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda tensor: saved.append(leaf.snapshot()) or make(tensor))
    leaf.update().after.fill_(2.0)
    assert [each.flat.tolist() for each in saved] == [[1.0, 1.0, 1.0]]
    assert leaf.before.tolist() == [1.0, 1.0, 1.0]
