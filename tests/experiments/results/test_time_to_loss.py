import dataclasses
import math

import pytest

from gradwire.experiments.results.table import table
from gradwire.experiments.results.time_to_loss import TimeToLoss, reference, steps_behind, times_to_loss

from ..given import results_of, run_of, timed_run

SLOWLY, AT_ONCE = (4.0, 4.0, 4.0, 4.0, 1.0), (1.0,) * 5


def times(*runs):
    """Of runs without turns."""
    return [each and each.seconds for each in times_to_loss(results_of(*runs))]


def repeats(run):
    (found,) = times_to_loss(results_of(run))
    return found.repeats


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (["none", "fp16", "bf16"], "bf16"),
        (["none", "topk", "fp16"], "fp16"),
        (["topk", "none"], "none"),
        (["topk"], None),
    ],
)
def test_what_users_have_anyway_is_to_be_reached(specs, expected):
    found = reference(results_of(*map(run_of, specs)))
    assert (found and found.compressor) == expected


def test_a_run_that_is_there_at_once_is_there_after_one_step():
    assert times(run_of("bf16", loss=SLOWLY, p50=1.0), run_of("topk", loss=AT_ONCE, p50=0.5)) == [5.0, 0.5]


def test_one_per_cent_above_is_near_enough_and_a_run_that_never_gets_there_has_no_time():
    near, far = run_of("topk", loss=(1.009,) * 5), run_of("onebit", loss=(1.011,) * 5)
    assert times(run_of("bf16", loss=AT_ONCE), near, far) == [0.1, 0.1, None]


def test_without_an_uncompressed_run_there_is_nothing_to_reach():
    assert times(run_of("topk"), run_of("onebit")) == [None, None]
    assert table(results_of(run_of("topk"))).caption == ""


def test_a_repeat_is_every_fifth_turn_for_all_steps_without_the_first():
    """Seconds per step of turn t are t, but for the first, which sets up; the loss is reached in the last step."""
    run = timed_run("bf16", [99.0, *range(1, 13)], turn_steps=2, loss=[4.0] * 25 + [0.1])
    assert repeats(run) == pytest.approx([26 * mean for mean in ((1 + 6 + 11) / 3, (2 + 7 + 12) / 3, 5.5, 6.5, 7.5)])


def test_turns_long_after_the_loss_do_not_count():
    run = timed_run("bf16", [9.0, *[1.0] * 5, *[7.0] * 20], loss=[1.0] * 26)
    assert repeats(run) == (1.0,) * 5


def test_a_turn_that_is_not_whole_does_not_count():
    run = timed_run("bf16", [1.0] * 4, turn_steps=3)
    assert len(repeats(run)) == 3
    shorter = dataclasses.replace(run, loss=run.loss[:-1], train_seconds=run.train_seconds[:-1])
    assert len(repeats(shorter)) == 2


def test_without_turns_the_time_is_what_it_took():
    run = dataclasses.replace(timed_run("bf16", [3.0, 1.0, 1.0], loss=[4.0, 4.0, 0.1]), turn_steps=None)
    assert repeats(run) == (5.0,)


def test_quartiles_that_touch_do_not_differ():
    one, touching, apart = (TimeToLoss(each) for each in ((1.0, 2, 3, 4, 5), (0.0, 4, 5, 6, 9), (0.0, 4.1, 5, 6, 9)))
    assert one.quartiles == (2, 3, 4)
    assert not one.differs_from(touching)
    assert not touching.differs_from(one)
    assert one.differs_from(apart)
    assert apart.differs_from(one)


def test_a_training_at_half_the_pace_is_half_of_its_steps_behind():
    """Loss is 100 less a number per step, so a smoothed loss lags alike; what is ahead is not behind."""

    def falling(pace):
        return [100 - pace * step for step in range(60)]

    runs = [run_of("bf16", loss=falling(1)), run_of("int8", loss=falling(1)), run_of("int4", loss=falling(2))]
    half, broken = run_of("onebit", loss=falling(0.5)), run_of("topk", loss=[*falling(1)[:-1], math.nan])
    shown = steps_behind(results_of(*runs, half, broken))
    late = int(shown.split()[-3])
    assert shown == f"Steps behind bf16 after 60 steps (training loss): 0 with int8, 0 with int4, {late} with onebit."
    assert late == pytest.approx(30, abs=5)


def test_nothing_is_behind_where_there_is_no_uncompressed_run_or_nothing_else():
    assert steps_behind(results_of(run_of("onebit"))) == steps_behind(results_of(run_of(), run_of("bf16"))) == ""
    assert steps_behind(results_of(run_of(loss=[math.nan]), run_of("onebit"))) == ""
