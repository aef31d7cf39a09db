"""A step may be taken back without copies: new numbers are written beside the old ones."""

import pytest
import torch

from gradwire.compress import ErrorFeedback, Float32Arithmetic, PowerSGD, Simulation, Switch, compressor
from gradwire.compress.state.tree import Leaves, PerParameter

from .given import Scaled, gradients, layout
from .test_laws import OBJECTS, SPECS, build

SHAPES = ((24, 16), (7,), (13, 3, 3, 3), (1,), (5, 1))
MORE = [
    "topk:ratio=0.2,start_iter=2,warmup=onebit",
    "bf16:start_iter=2,warmup=topk",
    "fp16+powersgd:rank=2,power_iterations=2",
    "topk:error_feedback=0.9,momentum=0.9",
    "onebit:block=8,error_feedback=0.5",
    "bf16+powersgd:rank=1,momentum=0.5,start_iter=2",
]
CASES = pytest.mark.parametrize("spec", [*SPECS, *OBJECTS, *MORE])
STEPS = 4


def poison(room):
    """Write what shows wherever it is read."""
    room.fill_(torch.nan if room.is_floating_point() else 255)


class Versioned(Simulation):
    """A simulation in which every step has to be kept or undone; the room for the next numbers is poisoned."""

    def __init__(self, compressor, layout):
        super().__init__(compressor, layout)
        self.ranks = [Leaves(state, versioned=True) for state in self.states]
        self.steps = 0

    @property
    def flat(self):
        return [leaf for rank in self.ranks for leaf in rank.flat]

    def begin(self, gradients):
        for rank in self.ranks:
            rank.set_step(self.steps)
        return self.step(gradients)[0]

    def keep(self):
        rooms = [leaf.before for leaf in self.flat if leaf.before is not leaf.flat]
        for rank in self.ranks:
            rank.end_step(keep=True)
        for room in rooms:
            poison(room)
        self.steps += 1

    def undo(self):
        rooms = [leaf.flat for leaf in self.flat if leaf.before is not leaf.flat]
        for rank in self.ranks:
            rank.undo()
        for room in rooms:
            poison(room)

    def numbers(self):
        return [leaf.flat.clone() for leaf in self.flat]


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_that_are_kept_are_those_in_place_to_the_bit(spec, dtype):
    within = layout(*SHAPES, dtype=dtype, world_size=3)
    versioned, in_place = Versioned(build(spec), within), Simulation(build(spec), within)
    for step in range(STEPS):
        given = gradients(within, step)
        assert torch.equal(versioned.begin(given), in_place.step(given)[0])
        versioned.keep()
        assert same(versioned.numbers(), [leaf.flat for state in in_place.states for leaf in Leaves(state).flat])


@CASES
@pytest.mark.parametrize("bad", [1e6, torch.inf, torch.nan])
def test_after_a_step_that_was_undone_training_goes_on_as_if_it_had_not_been(spec, bad):
    within = layout(*SHAPES, world_size=2)
    undone, untouched = Versioned(build(spec), within), Versioned(build(spec), within)
    for step in range(STEPS):
        given = gradients(within, step)
        before = undone.numbers()
        undone.begin([gradient * bad for gradient in gradients(within, 100 + step)])
        undone.undo()
        assert same(undone.numbers(), before)
        assert torch.equal(undone.begin(given), untouched.begin(given))
        for simulation in (undone, untouched):
            simulation.keep()
        assert same(undone.numbers(), untouched.numbers())


@CASES
def test_what_is_saved_within_a_step_can_be_what_was_before_it(spec):
    within = layout(*SHAPES)
    simulation, changed = Versioned(build(spec), within), False
    for step in range(3):
        settled = simulation.ranks[1].save()
        simulation.begin(gradients(within, step))
        now, before = simulation.ranks[1].save(), simulation.ranks[1].snapshot().save()
        assert before.keys() == settled.keys() == now.keys()
        assert all(
            torch.equal(before[name][field], settled[name][field]) for name in settled for field in settled[name]
        )
        changed |= any(not torch.equal(now[name][field], settled[name][field]) for name in now for field in now[name])
        simulation.keep()
    assert changed or not any(numbers.any() for numbers in simulation.numbers())


@pytest.mark.parametrize("ends", ["keep", "undo"])
@pytest.mark.parametrize("within", [True, False])
def test_what_was_taken_is_never_written_to_again_and_costs_one_tensor(ends, within):
    leaf = PerParameter.zeros(layout((3,)), residual=True)
    leaf.versioned, versions, taken = True, set(), []
    for step in range(6):
        expected = leaf.flat.clone()
        taken += [] if within or step != 2 else [(leaf.snapshot(), expected)]
        leaf.update().after.fill_(step + 1.0)
        taken += [(leaf.snapshot(), expected)] if within and step == 2 else []
        getattr(leaf, ends)()
        versions.add(leaf.before.data_ptr())
        assert all(torch.equal(each.flat, numbers) for each, numbers in taken)
    assert len(versions) == (3 if ends == "keep" else 1)


def test_a_stage_that_a_step_does_not_use_is_not_touched():
    built = ErrorFeedback(Float32Arithmetic(Switch({0: Scaled(0.5), 3: PowerSGD(2)})))
    within = layout(*SHAPES)
    simulation = Versioned(built, within)
    (q,) = [leaf for leaf in simulation.ranks[0].flat if leaf.optional]
    for step in range(5):
        version = q.flat
        simulation.begin(gradients(within, step))
        assert (q.flat is version) == (step < 3)
        simulation.keep()


def test_what_a_warm_up_held_back_is_brought_out_once_and_again_after_an_undone_step():
    within = layout(*SHAPES)
    simulation = Versioned(compressor("bf16:start_iter=1,warmup=topk"), within)
    simulation.begin(gradients(within))
    simulation.keep()
    held = [rank.held_back() for rank in simulation.ranks]
    for _ in range(2):
        simulation.begin(gradients(within))
        assert not any(rank.hold_back for rank in map(Leaves, [state.stages[0] for state in simulation.states]))
        simulation.undo()
    for rank, owed in zip(simulation.ranks, held, strict=True):
        assert same(list(rank.held_back().values()), list(owed.values()))
    simulation.begin(gradients(within))
    simulation.keep()
    versions = [leaf.flat for leaf in simulation.flat]
    simulation.begin(gradients(within))
    assert all(leaf.flat is version for leaf, version in zip(simulation.flat, versions, strict=True))
