"""Options of error feedback on real ranks: picked for an optimizer, saved, resized, refused where they cannot hold."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.compress.state.gauge import EVERY, IN_A_ROW, WARM_UP
from gradwire.ddp_core.measure.step import Step

from ..ddp_core.errors import warned
from .given import SHAPES, Given, attached, average, gradients, steps

EVERYTHING = "topk:ratio=0.1,error_feedback=0.8,momentum=0.9"
MOMENTUM = "topk:ratio=1,momentum=0.5"  # all is sent: an average is that of the momenta


def trained(rank, world_size):
    ddp, handle = attached(MOMENTUM)
    return steps(ddp, rank, 0, 3), handle.state_dict()


def resized(rank, world_size, states):
    ddp, handle = attached(MOMENTUM)
    handle.load_state_dict(states, resize=True)
    return average(ddp, [torch.zeros(shape) for shape in SHAPES])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_with_the_mean_momentum(ranks, before, after):
    answers = ranks.run(trained, before)
    last, states = answers[0][0][-1], [state for _, state in answers]
    for averages in ranks.run(resized, after, states):
        for name, numbers in last.items():
            torch.testing.assert_close(averages[name], 0.5 * numbers)


def rescaled(rank, world_size):
    """Averages with a loss scale that changes, over those with one that does not."""
    found = []
    for scales in ([1.0] * 4, [1.0, 1.0, 4.0, 4.0]):
        ddp, handle = attached(EVERYTHING)
        averages = []
        for step, scale in enumerate(scales):
            if step and scale != scales[step - 1]:
                handle.rescale(scale / scales[step - 1])
            given = [scale * gradient for gradient in gradients(rank, step, SHAPES)]
            averages.append({name: average / scale for name, average in average(ddp, given).items()})
        found.append(averages[2])
    return found


def test_momentum_follows_the_loss_scale(ranks):
    for plain, scaled in ranks.run(rescaled, 2):
        for name in plain:
            torch.testing.assert_close(scaled[name], plain[name])


def partial(rank, world_size):
    ddp = TorchDDP(Given(SHAPES), find_unused_parameters=True)
    with pytest.raises(
        ValueError, match=r"topk:momentum=0\.9 needs the gradients of all parameters.*leave out momentum="
    ):
        gradwire.attach(ddp, "topk:momentum=0.9")
    handle = gradwire.attach(ddp, "topk:error_feedback=0.9")
    before = handle.compressor
    with pytest.raises(ValueError, match="needs the gradients of all parameters"):
        handle.swap("topk:momentum=0.9")
    average(ddp, gradients(rank, 0, SHAPES))
    handle.averager.begin_step(Step())  # a step that goes on while another thread swaps
    with ThreadPoolExecutor(1) as other, pytest.raises(ValueError, match="needs the gradients of all parameters"):
        other.submit(handle.swap, "topk:momentum=0.9").result()
    average(ddp, gradients(rank, 1, SHAPES))
    return handle.compressor == before


def test_momentum_is_refused_where_parameters_may_go_unused(ranks):
    assert ranks.run(partial, 1) == [True]


def run_away(rank, world_size, spec):
    """What is said while gradients become a hundredth of what they were, and the statistics at the end."""
    ddp, handle = attached(spec)
    with warned("error feedback diverges") as said:
        for step in range(WARM_UP * EVERY + (IN_A_ROW + 1) * EVERY):
            scale = 1.0 if step < WARM_UP * EVERY else 0.01
            average(ddp, [scale * gradient for gradient in gradients(rank, step, SHAPES)])
    stats = handle.stats().buckets
    return said, [(bucket.feedback.residual_ratio, bucket.feedback.cosine) for bucket in stats]


def test_a_residual_that_runs_away_is_warned_of_once_with_what_to_do_and_is_in_the_statistics(ranks):
    for said, stats in ranks.run(run_away, 2, "topk:ratio=0.01", timeout=60):
        assert len(said) == 1
        for way_out in ("error_feedback=", "start_iter=", "learning rate"):
            assert way_out in said[0]
        assert len(stats) > 1
        assert max(ratio for ratio, _ in stats) > 20
        assert all(0 < cosine < 1 for _, cosine in stats)
