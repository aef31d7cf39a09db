"""A bucket is sent by the least exact compressor that is good enough; ranks change alike, losing nothing."""

import pytest
import torch

from gradwire.compress import Hierarchical, Simulation, compressor, most_rounds
from gradwire.compress.state import tree as states
from gradwire.compress.state.agreed import choices
from gradwire.testing import held_back

from ..given import assert_goes_on_after_a_load, gradients, layout, placed
from ..test_undo import Versioned, same

SHAPES = ((64, 32), (7,), (13, 3, 3, 3), (1,), (5, 1))
RATIOS = (0.5, 0.2, 0.05)
TOPK = "none/topk:ratio=0.5/topk:ratio=0.2/topk:ratio=0.05"
CHANGES = [0, 3, 1, 2, 3, 0, 2, 2, 1]


def adaptive(ladder=TOPK, **options):
    return compressor({"name": "adaptive", "ladder": ladder, **options})


def chosen(simulation):
    """What each rank has chosen for the next step."""
    return [choice.now for state in simulation.states for choice in choices(state)]


def few(within):
    """A flat gradient for each rank whose elements are zero but for 80: every compressor of TOPK sends it exactly."""
    return [
        torch.zeros(within.numel).index_fill_(0, torch.arange(80) + rank, 1.0)
        for rank in range(within.ranks.world_size)
    ]


def forced(simulation, method):
    """Have all ranks find a method good enough, as if they had agreed on it."""
    for state in simulation.states:
        for choice in choices(state):
            cosines = [1.0 if place <= method else 0.0 for place in range(len(choice.methods))]
            after = choice.update().after
            after.copy_(torch.tensor(cosines))
            choice.bring(after)
            choice.keep()


def kept_by_topk(flat, ratio):
    """The cosine of the largest elements with all of them: the root of their part of the squares."""
    squares = flat.double().square().sort(descending=True).values
    return (squares[: round(ratio * len(squares))].sum() / squares.sum()).sqrt().item()


@pytest.mark.parametrize("target", [0.0, 0.5, 0.8, 0.97, 0.999])
def test_the_last_method_is_taken_whose_mean_cosine_is_the_target_s_by_a_closed_form(target):
    within = layout((2000,), world_size=3)
    given = gradients(within)
    means = [sum(kept_by_topk(flat, ratio) for flat in given) / 3 for ratio in RATIOS]
    expected = max((place for place, each in enumerate(means, start=1) if each >= target), default=0)
    simulation = Simulation(adaptive(target=target), within)
    simulation.step(given)
    assert chosen(simulation) == [expected] * 3
    assert simulation.states[0].inner.choice.numbers() == pytest.approx([1, *means], abs=1e-3)


def test_gradients_of_another_kind_are_sent_by_another_method_from_the_step_after_the_next_look_on():
    within = layout((2000,))
    simulation = Simulation(adaptive(target=0.9, error_feedback=False), within)
    for step in range(8):
        simulation.step(gradients(within, step))
    assert chosen(simulation) == [1, 1]
    simulation.step(few(within))
    assert chosen(simulation) == [3, 3]


@pytest.mark.parametrize("ladder", [TOPK, "none/int8/int4/int2", "none/powersgd:rank=8/powersgd:rank=2/onebit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_goes_in_comes_out_or_is_held_back_while_methods_change(ladder, dtype):
    within = layout(*SHAPES, dtype=dtype, world_size=3)
    simulation = Simulation(adaptive(ladder), within)
    for step, method in enumerate(CHANGES):
        forced(simulation, method)
        given, before = gradients(within, step), held_back(simulation, within)
        outs = simulation.step(given)
        assert all(torch.equal(out, outs[0]) for out in outs)
        entered = sum(gradient.double() for gradient in given) / 3 + before
        lacking = entered - outs[0].double() - held_back(simulation, within)
        assert lacking.abs().max() <= 2e-6 * max(1, entered.abs().max())


def test_without_error_feedback_what_a_method_held_back_comes_out_in_16_bits_rounded_once():
    within = layout((64, 32), dtype=torch.bfloat16)
    simulation = Simulation(adaptive("none/fp16+powersgd:rank=2", error_feedback=False), within)
    lacking, rounded = torch.zeros(2, within.numel, dtype=torch.float64)
    for step, method in enumerate((1, 0)):
        forced(simulation, method)
        given = gradients(within, step)
        out = simulation.step(given)[0].double()
        lacking += sum(gradient.double() for gradient in given) / len(given) - out
        rounded += 0.51 * torch.finfo(torch.bfloat16).eps * out.abs()
    assert (lacking.abs() <= rounded + 1e-6).all()


def test_a_step_in_which_the_choice_changes_can_be_taken_back():
    within = layout(*SHAPES)
    undone, untouched = (Versioned(adaptive(target=0.9, error_feedback=False), within) for _ in range(2))
    for step in range(4):
        for bad in (1e6, torch.inf):
            before = undone.numbers()
            undone.begin([gradient * bad for gradient in few(within)])
            assert step not in (0, 2) or bad == torch.inf or chosen(undone) == [3, 3]
            undone.undo()
            assert same(undone.numbers(), before)
        assert torch.equal(undone.begin(gradients(within, step)), untouched.begin(gradients(within, step)))
        undone.keep()
        untouched.keep()
        assert same(undone.numbers(), untouched.numbers())


def test_a_state_goes_on_with_the_choice_and_its_inputs_in_the_same_bits():
    for more in (0, 7):
        resumed = assert_goes_on_after_a_load(adaptive(target=0.9), layout(*SHAPES), 5, more)
        assert chosen(resumed) == [1, 1]


def test_buckets_that_become_one_go_on_with_the_choice_that_asks_for_most():
    parts, whole = [layout((500,), names=[name], world_size=1) for name in "ab"], layout((500,), (500,), names="ab")
    entries = {}
    for part, method in zip(parts, (3, 1), strict=True):
        simulation = Simulation(adaptive(), part)
        forced(simulation, method)
        entries |= states.save(simulation.states[0])
    joined = Simulation(adaptive(), placed(whole, world_size=1))
    states.load(joined.states[0], entries)
    assert chosen(joined) == [1]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_bad_gradients_change_no_choice_and_in_the_first_step_the_next_one_chooses(bad):
    within = layout((2000,))
    simulation = Versioned(adaptive(target=0.8), within)
    simulation.begin([gradients(within)[0], gradients(within)[1] * bad])
    assert chosen(simulation) == [0, 0]
    simulation.undo()
    simulation.begin(gradients(within))
    simulation.keep()
    assert chosen(simulation) == [2, 2]
    simulation.steps = 2
    simulation.begin([gradients(within)[0] * bad, gradients(within)[1]])
    assert chosen(simulation) == [2, 2]


def test_every_share_of_a_host_chooses_for_itself_in_as_many_rounds():
    within = layout(*SHAPES, world_size=4, per_host=2)
    simulation = Simulation(Hierarchical(adaptive("none/topk:ratio=0.5/topk:ratio=0.2", target=0.9)), within)
    for step in range(12):
        given, before = gradients(within, step), held_back(simulation, within)
        for flat, other in zip(given, few(within), strict=True):
            flat[: within.numel // 2] = other[: within.numel // 2]
        outs = simulation.step(given)
        assert all(torch.equal(out, outs[0]) for out in outs)
        entered = sum(gradient.double() for gradient in given) / 4 + before
        assert (entered - outs[0] - held_back(simulation, within)).abs().max() < 4e-6 * entered.abs().max()
    assert chosen(simulation) == [2, 1, 2, 1]


@pytest.mark.parametrize("start", [1, 3, 5, 30])
def test_no_step_takes_more_rounds_than_were_counted_beforehand_whenever_it_begins(start):
    built, within = compressor(f"adaptive:start_iter={start}"), layout(*SHAPES, world_size=2)
    simulation, rounds = Simulation(built, within), set()
    for step in range(60):
        simulation.step(gradients(within, seed=step))
        rounds.add(simulation.traffic.rounds)
    assert max(rounds) <= most_rounds(built, [within])
