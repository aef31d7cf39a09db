"""A guard: training that error feedback makes diverge survives, all ranks do alike, and dense steps lose nothing."""

import pytest
import torch

from gradwire.compress import Float32Arithmetic, Guarded, Layout, Ranks, Simulation, compressor, dry_run, most_rounds
from gradwire.compress.feedback.guard import DAMPING, DENSE, FIRST_REST, LONGEST_REST, WATCHING, Mode
from gradwire.compress.state import tree as states
from gradwire.compress.state.gauge import EVERY, Seen
from gradwire.compress.state.tree import Leaves

from ..given import gradients, layout, mean
from ..test_laws import mean_held_back
from ..test_undo import Versioned, same

SHAPES = ((64, 32), (7,), (13, 3, 3, 3), (1,), (5, 1))
ROWS, COLUMNS, BATCH = 16, 64, 32


class LeastSquares:
    """A linear model on two simulated ranks, features of unlike scales, under SGD with a momentum of 0.9."""

    def __init__(self, spec, rate):
        self.generator = torch.Generator().manual_seed(0)
        self.scale = torch.arange(1, COLUMNS + 1).float().rsqrt()
        self.truth = torch.randn(ROWS, COLUMNS, generator=self.generator)
        self.weight, self.velocity = torch.zeros(2, ROWS, COLUMNS)
        self.rate, self.modes = rate, []
        within = Layout(("weight",), ((ROWS, COLUMNS),), torch.float32, torch.device("cpu"), Ranks(2))
        self.simulation = Simulation(compressor(spec), within)

    def gradient(self):
        inputs = torch.randn(COLUMNS, BATCH, generator=self.generator) * self.scale[:, None]
        noise = 0.1 * torch.randn(ROWS, BATCH, generator=self.generator)
        return (((self.weight - self.truth) @ inputs + noise) @ inputs.T / BATCH).view(-1)

    def train(self, steps):
        """The loss afterwards."""
        for _ in range(steps):
            outs = self.simulation.step([self.gradient() for _ in range(2)])
            assert torch.equal(*outs)
            self.velocity = 0.9 * self.velocity + outs[0].view(ROWS, COLUMNS)
            self.weight = self.weight - self.rate * self.velocity
            self.modes.append([getattr(state, "gauge", None) and state.gauge.guard for state in self.simulation.states])
        return ((self.weight - self.truth) * self.scale).square().sum().item()


def test_onebit_under_momentum_runs_away_without_a_guard_and_survives_with_one_where_all_ranks_do_alike():
    dense, alone, guarded = (
        LeastSquares(spec, rate=0.1)
        for spec in ("none", "onebit:rotate=false,feedback=1", "onebit:rotate=false,feedback=1,guard=true")
    )
    assert dense.train(300) < 0.1
    assert alone.train(300) > 1e6
    assert guarded.train(800) < 1
    assert all(first == second for first, second in guarded.modes)
    assert {first for first, _ in guarded.modes} == {"watching", "damping", "dense"}


def test_where_nothing_runs_away_a_guard_changes_no_bit():
    guarded, alone = (LeastSquares(f"topk:ratio=0.05{tail}", rate=0.1) for tail in (",guard=true", ""))
    assert guarded.train(200) == alone.train(200)
    assert guarded.modes[-1] == ["watching"] * 2


def in_mode(spec, within, mode, kind=Simulation):
    """A simulation whose guard is in a mode."""
    simulation = kind(compressor(spec), within)
    for state in simulation.states:
        verdict = (state if hasattr(state, "verdict") else state.inner).verdict
        verdict.write(None, Seen(), mode)
        verdict.keep()
    return simulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["onebit:block=8", "powersgd:rank=1", "topk:start_iter=1", "int4:space=adam"])
def test_dense_steps_lose_nothing_and_bring_out_what_was_held_back(spec, dtype):
    within = layout(*SHAPES, dtype=dtype, world_size=3)
    simulation = Simulation(compressor(spec + (",guard=true" if ":" in spec else ":guard=true")), within)
    for step in range(3):
        simulation.step(gradients(within, step))
    held = mean_held_back(simulation, within)
    for state in simulation.states:
        state.verdict.write(None, Seen(), Mode(DENSE, 9, 1))
    for step in range(3, 40):
        given, before = gradients(within, step), mean_held_back(simulation, within)
        out = simulation.step(given)[0]
        entered = sum(gradient.double() for gradient in given) / 3 + before
        bound = 1e-5 if dtype == torch.float32 else 2**-8
        assert (out + mean_held_back(simulation, within) - entered).abs().max() <= bound * max(1, entered.abs().max())
    assert mean_held_back(simulation, within).norm() < 0.01 * held.norm()


def test_with_nothing_held_back_a_dense_step_is_the_mean():
    within = layout(*SHAPES)
    simulation = in_mode("topk:guard=true", within, Mode(DENSE, 9, 1))
    assert torch.equal(simulation.step(gradients(within))[0], mean(gradients(within)))


def test_damping_halves_what_is_held_back():
    within = layout(*SHAPES)
    damped, alone = in_mode("topk:guard=true", within, Mode(DAMPING, 9, 1)), Simulation(compressor("topk"), within)
    for simulation in (damped, alone):
        simulation.step(gradients(within))
    assert torch.equal(damped.states[0].inner.residual.flat, alone.states[0].residual.flat / 2)


@pytest.mark.parametrize("mode", [Mode(), Mode(DAMPING, 2, 1), Mode(DENSE, 2, 2)], ids=str)
def test_a_state_goes_on_in_the_same_bits_in_every_mode_and_across_the_steps_where_ranks_agree(mode):
    within = layout(*SHAPES, world_size=1)
    first, second = (
        in_mode("onebit:block=8,guard=true", within, mode),
        Simulation(compressor("onebit:block=8,guard=true"), within),
    )
    for step in range(EVERY):
        first.step(gradients(within, step))
    saved = states.save(first.states[0])
    assert all(each.isfinite().all() for fields in saved.values() for each in fields.values())
    assert states.load(second.states[0], saved) == {}
    states.set_step(second.states[0], EVERY)
    for step in range(EVERY, 4 * EVERY):
        assert torch.equal(first.step(gradients(within, step))[0], second.step(gradients(within, step))[0])
    assert first.states[0].verdict.read() == second.states[0].verdict.read()


@pytest.mark.parametrize("bad", [1e6, torch.inf])
def test_a_step_where_ranks_agree_can_be_taken_back(bad):
    within = layout(*SHAPES)
    undone, untouched = (in_mode("topk:guard=true", within, Mode(DENSE, 1, 1), kind=Versioned) for _ in range(2))
    for step in range(EVERY + 1):
        undone.begin([gradient * bad for gradient in gradients(within, 100 + step)])
        undone.undo()
        assert torch.equal(undone.begin(gradients(within, step)), untouched.begin(gradients(within, step)))
        undone.keep()
        untouched.keep()
        assert same(undone.numbers(), untouched.numbers())


class TestMode:
    def test_first_it_damps_then_it_sends_dense_for_longer_each_time_and_each_time_it_tries_anew(self):
        mode, told = Mode(), []
        for _ in range(8):
            mode = mode.following(runs_away=True)
            told.append((mode.now, mode.left))
            for _ in range(mode.left):
                mode = mode.following(runs_away=False)
            assert mode.now == WATCHING
        rests = [min(LONGEST_REST, FIRST_REST * 2**times) for times in range(7)]
        assert told == [(DAMPING, FIRST_REST), *((DENSE, rest) for rest in rests)]

    def test_where_damping_does_not_help_dense_steps_follow_at_once(self):
        assert Mode(DAMPING, 3, 1).following(runs_away=True) == Mode(DENSE, FIRST_REST, 2)

    def test_dense_steps_are_not_judged(self):
        assert Mode(DENSE, 3, 2).following(runs_away=True) == Mode(DENSE, 2, 2)


def test_a_guard_asks_for_a_round_more_at_one_step_of_16_and_plans_know():
    within = layout((64, 32))
    alone, guarded = compressor("powersgd:start_iter=3"), compressor("powersgd:start_iter=3,guard=true")
    assert dry_run(guarded, within) == dry_run(alone, within)
    assert most_rounds(guarded, [within]) == most_rounds(alone, [within]) + 1
    rounds = [dry_run(guarded, within, step).rounds - dry_run(alone, within, step).rounds for step in range(32)]
    assert [step for step, more in enumerate(rounds) if more] == [8, 24]


def test_without_error_feedback_there_is_nothing_to_guard():
    with pytest.raises(ValueError, match="a guard is for error feedback, and there is none in Float32Arithmetic"):
        Guarded(Float32Arithmetic(compressor("topk:error_feedback=false"))).init(layout((4,)))


def test_samples_of_which_a_rank_has_no_gradient_are_no_reason_to_act():
    within = layout(*SHAPES)
    simulation = Simulation(compressor("fp16+powersgd:guard=true"), within)
    for step in range(6 * EVERY):
        first, second = gradients(within, step)
        simulation.step([first, second * (0 if step % (2 * EVERY) == EVERY // 2 else 1)])
    verdict = simulation.states[0].inner.verdict
    assert verdict.read()[2] == Mode()
    assert verdict.read()[1].samples == 2  # of three, the last of which is judged at the next one
    assert Leaves(simulation.states[0]).hold_back
