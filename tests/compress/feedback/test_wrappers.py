"""Compressors that contain compressors."""

import pytest
import torch

from gradwire.compress import Dense, ErrorFeedback, Float32Arithmetic, Gathered, Simulation, Switch, TopK, compressor
from gradwire.testing import held_back

from ..given import RANKS, Scaled, gradients, layout, mean


class TestSwitch:
    def test_each_step_belongs_to_the_last_stage_that_has_started(self):
        stages = {0: Scaled(1.0), 2: Scaled(2.0), 3: Scaled(3.0), 7: Scaled(7.0)}
        simulation = Simulation(Switch(stages), layout((2,)))
        ran = [simulation.step([torch.ones(2)] * RANKS)[0][0].item() for _ in range(9)]
        assert ran == [1, 1, 2, 3, 3, 3, 3, 7, 7]

    @pytest.mark.parametrize("steps", [(), (1,), (-1, 0), (5, 9)], ids=str)
    def test_stages_that_do_not_start_at_step_zero_are_refused(self, steps):
        with pytest.raises(ValueError, match=r"start at step 0.*got steps \["):
            Switch(dict.fromkeys(steps, Dense()))

    @pytest.mark.parametrize("start", [0, 1, 3])
    @pytest.mark.parametrize("spec", ["powersgd:rank=1,min_compression_rate=0", "topk:k=2", "onebit", "fp16"])
    def test_the_steps_before_start_iter_are_dense_and_the_next_is_not(self, spec, start):
        within = layout((8, 6))
        colon = "," if ":" in spec else ":"
        simulation = Simulation(compressor(f"{spec}{colon}start_iter={start}"), within)
        for step in range(start + 2):
            given = gradients(within, step)
            exact = torch.equal(simulation.step(given)[0], mean(given))
            assert exact == (step < start)

    def test_the_first_compressed_step_is_that_of_a_compressor_without_warm_up(self):
        within = layout((8, 6))
        warm, cold = (Simulation(compressor(f"powersgd:rank=2{tail}"), within) for tail in (",start_iter=3", ""))
        for step in range(3):
            warm.step(gradients(within, step))
        for step in range(3, 6):
            assert torch.equal(warm.step(gradients(within, step))[0], cold.step(gradients(within, step))[0])

    def test_back_to_dense_everything_held_back_is_sent(self):
        within = layout((8, 6))
        stages = {0: Gathered(TopK(k=2)), 3: Dense()}
        simulation = Simulation(ErrorFeedback(Float32Arithmetic(Switch(stages))), within)
        given = [gradients(within, step) for step in range(4)]
        total = sum(simulation.step(step)[0] for step in given)
        assert torch.allclose(total, sum(mean(step) for step in given), atol=1e-5)
        assert not held_back(simulation, within).any()

    @pytest.mark.parametrize(
        "spec",
        [
            "powersgd:rank=6,min_compression_rate=0,start_iter=3,warmup=topk:k=2",
            "powersgd:rank=6,min_compression_rate=0,start_iter=3,warmup=onebit",
            {"name": "bf16", "start_iter": 3, "warmup": "fp16+powersgd:rank=1,min_compression_rate=0"},
            "fp16:start_iter=3,warmup=topk",
        ],
        ids=str,
    )
    def test_what_a_warm_up_held_back_is_sent_afterwards(self, spec):
        within = layout((8, 6))
        simulation = Simulation(compressor(spec), within)
        for step in range(3):
            simulation.step(gradients(within, step))
        owed = held_back(simulation, within)
        assert owed.abs().max() > 0.1
        sent = sum(simulation.step([torch.zeros(within.numel)] * RANKS)[0] for _ in range(3))
        assert held_back(simulation, within).abs().max() < 1e-5
        assert (sent - owed).abs().max() < 4e-3 * owed.abs().max()


class TestErrorFeedback:
    def test_what_16_bits_cannot_hold_of_the_average_is_held_back_by_every_rank(self):
        within = layout((1,), dtype=torch.bfloat16)
        simulation = Simulation(ErrorFeedback(Float32Arithmetic(Dense())), within)
        given = [torch.tensor([number], dtype=torch.bfloat16) for number in (1.0, 2.0**-8)]
        assert simulation.step(given)[0].item() == 0.5
        assert [state.residual.flat.item() for state in simulation.states] == [2.0**-9] * RANKS
        assert simulation.step([torch.zeros(1, dtype=torch.bfloat16)] * RANKS)[0].item() == 2.0**-9

    @pytest.mark.parametrize(
        ("kept", "averages", "held"),
        [(1.0, [0.5, 0.75, 0.875, 0.9375], 0.9375), (0.5, [0.5, 0.625, 0.65625, 0.6640625], 0.33203125)],
    )
    def test_what_is_held_back_or_a_part_of_it_is_added_to_the_next_gradient(self, kept, averages, held):
        simulation = Simulation(ErrorFeedback(Scaled(0.5), kept=kept), layout((1,)))
        assert [simulation.step([torch.ones(1)] * RANKS)[0].item() for _ in range(4)] == averages
        assert [state.residual.flat.item() for state in simulation.states] == [held] * RANKS

    def test_an_outer_residual_moves_into_the_inner_one(self):
        simulation = Simulation(ErrorFeedback(ErrorFeedback(Scaled(0.5))), layout((1,)))
        for state in simulation.states:
            state.residual.flat.fill_(3.0)
        assert simulation.step([torch.ones(1)] * RANKS)[0].item() == 2.0
        assert [state.residual.flat.item() for state in simulation.states] == [0.0] * RANKS
        assert [state.inner.residual.flat.item() for state in simulation.states] == [2.0] * RANKS
