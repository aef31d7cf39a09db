import dataclasses
import math
import random

import pytest

from gradwire.experiments.advice.rule import Rule
from gradwire.experiments.results.verdict import NO_DIFFERENCE, recommendation

from ..given import results_of, run_of, timed_run

NO_VERDICT = "No verdict"
NOT_HERE = "Do not compress here"


def steady(compressor, seconds, **options):
    """A run whose turns take the same time within a per cent, whatever was set up in the first."""
    return timed_run(compressor, [50.0, *(seconds * (1 + part / 100) for part in range(5))], **options)


def verdict(*runs, **changed):
    return recommendation(results_of(*runs, **changed))


def test_what_reaches_the_loss_first_is_recommended_with_both_times():
    told = verdict(steady("none", 8.0), steady("onebit", 4.0, held_out=2.01), environment={"network": "slow"})
    assert told == (
        "Use onebit. onebit takes 4.08 s to the loss, and uncompressed training 8.16 s: a speed-up of 2.00x. "
        "Its validation loss is +0.5%. Network: slow."
    )


def falling(steps, by):
    return tuple(10 - by * step for step in range(steps))


def test_time_to_loss_decides_and_not_step_time():
    """Steps of onebit are 1.2x faster and it learns half as much from each; those of topk are faster than int4's."""
    seconds, options = [1.0] * 13, {"turn_steps": 5}
    none = timed_run("none", seconds, loss=falling(65, 0.05), **options)
    onebit = timed_run("onebit", [each / 1.2 for each in seconds], loss=falling(65, 0.03), **options)
    assert verdict(none, onebit).startswith(f"{NOT_HERE}: no other compressor reaches")
    int4 = timed_run("int4", [each / 2 for each in seconds], loss=falling(65, 0.05), **options)
    topk = timed_run("topk", [each / 2.1 for each in seconds], loss=falling(65, 0.045), **options)
    assert verdict(none, topk, int4).startswith("Use int4. ")


def test_where_quartiles_overlap_it_says_no_difference_measured_and_nothing_else():
    noisy = timed_run("onebit", [1.0, 0.4, 0.5, 0.6, 1.1, 1.3])
    cold = steady("topk", 0.1, warmed_up=False)
    assert verdict(steady("none", 1.0), noisy, cold, environment={"network": "slow"}) == NO_DIFFERENCE
    clear = timed_run("onebit", [1.0, 0.4, 0.5, 0.6, 0.7, 1.3])
    assert verdict(steady("none", 1.0), clear).startswith("Use onebit.")


def test_a_machine_that_changes_its_speed_hides_no_difference_of_those_in_turns():
    """Half of the run at a third of the speed: every repeat samples both halves."""
    speeds = [1.0] * 16 + [3.0] * 15
    none = timed_run("none", speeds, loss=falling(31, 0.05))
    onebit = timed_run("onebit", [each / 1.5 for each in speeds], loss=falling(31, 0.05))
    assert "a speed-up of 1.50x" in verdict(none, onebit)


def test_noise_alone_is_seldom_taken_for_a_gain():
    """The same speed and heavy-tailed noise: a tenth at most of the verdicts recommend something."""
    noise, told = random.Random(0), []
    for _ in range(200):
        runs = [
            timed_run(spec, [noise.lognormvariate(0, 0.2) for _ in range(21)], loss=falling(21, 0.01))
            for spec in ("none", "onebit")
        ]
        told.append(verdict(*runs))
    assert sum(each.startswith("Use") for each in told) <= 20
    assert sum(each == NO_DIFFERENCE for each in told) >= 120


def test_a_run_that_was_warming_up_to_its_end_is_left_out_and_named():
    cold = [steady(spec, 0.1, warmed_up=False) for spec in ("topk", "onebit")]
    told = verdict(steady("none", 8.0), *cold, steady("powersgd", 4.0))
    assert told.startswith("Use powersgd.")
    assert told.endswith("Left out: topk, onebit, as their warm-ups do not end within the run.")
    told = verdict(steady("none", 8.0), cold[0])
    assert told.startswith(NO_VERDICT)
    assert told.endswith("Left out: topk, as its warm-up does not end within the run.")


def test_a_run_that_is_too_short_for_three_repeats_has_no_verdict():
    short = [timed_run(spec, [1.0] * 3) for spec in ("none", "onebit")]
    assert verdict(*short) == (
        "No verdict: 3 steps give 2 repeats of the time to the loss, and a verdict takes 3. Raise --steps."
    )
    assert not verdict(*(timed_run(spec, [1.0] * 4) for spec in ("none", "onebit"))).startswith(NO_VERDICT)


WHOLE = steady("none", 8.0)
VERDICTS = {  # a case: its runs, and what a verdict says
    "one run": ([steady("none", 1.0)], NO_VERDICT),
    "nothing that compresses further": ([steady("none", 1.0), steady("bf16", 1.0)], NO_VERDICT),
    "nothing to compare with": ([steady("onebit", 1.0), steady("topk", 1.0)], NO_VERDICT),
    "two that are as fast": (
        [WHOLE, steady("int4", 4.02), steady("topk", 4.0), steady("onebit", 5.0)],
        "Use topk or int4 (no difference measured between them). topk takes 4.08 s to the loss",
    ),
    "another validation loss": ([WHOLE, steady("onebit", 1.0, held_out=2.0 + 2.1 * Rule.tolerance)], NOT_HERE),
    "a validation loss within the rule's tolerance": (
        [WHOLE, steady("onebit", 1.0, held_out=2.0 + 1.9 * Rule.tolerance)],
        "Use onebit.",
    ),
    "a loss that diverges": ([WHOLE, steady("onebit", 1.0, held_out=math.nan)], NOT_HERE),
    "a loss that is never reached": (
        [steady("bf16", 8.0), steady("onebit", 1.0, loss=(2.1,) * 6)],
        "Do not compress further here: no other compressor reaches the training loss of bf16",
    ),
    "a reference that diverges": (
        [steady("none", 8.0, loss=(2.0, math.nan, 2.0, 2.0, 2.0, 2.0)), steady("onebit", 1.0)],
        f"{NO_VERDICT}: the loss of none is not finite",
    ),
    "a small gain": (
        [WHOLE, steady("onebit", 7.4)],
        f"{NOT_HERE}: uncompressed training takes 8.16 s to the loss, and onebit, the fastest other compressor, 7.55 s. "
        "A compressor must be 1.1x faster.",
    ),
    "a gain that is worth it": ([WHOLE, steady("onebit", 7.2)], "Use onebit."),
    "16 bits first, and the next step over it": (
        [steady("none", 10.0), steady("bf16", 6.0), steady("onebit", 5.0)],
        "Use bf16. bf16 takes 6.12 s to the loss, and uncompressed training 10.2 s: a speed-up of 1.67x. Its validation "
        "loss is +0.0%. Next step: onebit takes 5.10 s, 1.20x faster",
    ),
    "8 bits over 16 that are worth it": (
        [steady("none", 10.0), steady("bf16", 6.0), steady("int8", 5.0)],
        "Use int8. int8 takes 5.10 s to the loss, and bf16 6.12 s: a speed-up of 1.20x",
    ),
    "8 bits over none where 16 are not worth it": (
        [steady("none", 10.0), steady("bf16", 9.5), steady("int8", 9.0)],
        "Use int8. int8 takes 9.18 s to the loss, and uncompressed training 10.2 s: a speed-up of 1.11x",
    ),
    "8 bits before 4, and no next step that is not worth it": (
        [WHOLE, steady("int4", 4.0), steady("int8", 4.3)],
        "Use int8. int8 takes 4.39 s to the loss, and uncompressed training 8.16 s: a speed-up of 1.86x. "
        "Its validation loss is +0.0%. These CPU ranks share",
    ),
    "8 bits before 4, and 4 as the next step": (
        [WHOLE, steady("int4", 3.0, held_out=2.02), steady("int8", 6.0), steady("onebit", 3.5)],
        "Use int8. int8 takes 6.12 s to the loss, and uncompressed training 8.16 s: a speed-up of 1.33x. Its validation "
        "loss is +0.0%. Next step: int4 takes 3.06 s, 2.00x faster, and can cost loss; here +1.0%. These CPU ranks share",
    ),
    "4 bits whose difference from 8 was not measured": (
        [
            timed_run("none", [50.0, *[9.0] * 5]),
            timed_run("int8", [50.0, 4.6, 5.2, 5.8, 5.4, 6.2]),
            timed_run("int4", [50.0, 4.2, 4.9, 5.4, 4.8, 5.5]),
        ],
        "Use int8. int8 takes 5.40 s to the loss, and uncompressed training 9.00 s: a speed-up of 1.67x. "
        "Its validation loss is +0.0%. These CPU ranks share",
    ),
    "4 bits where 8 are not worth it": (
        [WHOLE, steady("int4", 6.0), steady("int8", 7.6)],
        f"{NOT_HERE}: none of 8 bits or more is 1.1x as fast as uncompressed training. Next step: int4 takes 6.12 s, 1.33x "
        "faster, and can cost loss; here +0.0%. These CPU ranks share",
    ),
    "4 bits where 16 are as fast as none": (
        [WHOLE, steady("bf16", 7.9), steady("int4", 4.0)],
        f"{NOT_HERE}: none of 8 bits or more is 1.1x as fast as uncompressed training. Next step: int4 takes 4.08 s",
    ),
    "no gain over 16 bits": (
        [steady("none", 10.0), steady("fp16", 5.0), steady("onebit", 5.0)],
        "Use fp16. fp16 takes",
    ),
    "one after the other": ([run_of(), run_of("onebit", p50=0.01)], f"{NO_VERDICT}: the compressors trained one after"),
    "some in turns": ([WHOLE, dataclasses.replace(steady("onebit", 1.0), turn_steps=None)], NO_VERDICT),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_verdict_begins_with_what_to_do(case):
    runs, words = VERDICTS[case]
    assert verdict(*runs).startswith(words)
