import math

import pytest

from gradwire.experiments.results.recommendation import recommendation

from ..given import results_of, run_of

NO_VERDICT = "No verdict"
NOT_HERE = "Do not compress further here"


@pytest.mark.parametrize(
    "runs",
    [[run_of()], [run_of(), run_of("bf16")], [run_of("onebit")], [run_of("onebit"), run_of("topk")]],
    ids=lambda runs: ",".join(run.compressor for run in runs),
)
def test_there_is_no_verdict_without_something_to_compare(runs):
    assert recommendation(results_of(*runs)).startswith(NO_VERDICT)


def test_a_faster_method_with_the_same_loss_is_worth_while():
    told = recommendation(results_of(run_of(), run_of("onebit", p50=0.05, held_out=2.05)))
    assert told.startswith(
        "onebit makes a step 2.00x as fast as none and keeps the held-out loss (within 3%), over 2 st"
    )


def test_the_fastest_of_those_that_keep_the_loss_is_named():
    told = recommendation(
        results_of(run_of(), run_of("onebit", p50=0.05), run_of("topk", p50=0.02), run_of("x", p50=0.03))
    )
    assert told.startswith("topk makes a step 5.00x as fast as none")


def test_a_faster_method_that_costs_loss_is_not_worth_while():
    assert recommendation(results_of(run_of(), run_of("onebit", p50=0.01, held_out=2.07))).startswith(NOT_HERE)


def test_a_method_that_diverged_is_not_worth_while():
    assert recommendation(results_of(run_of(), run_of("onebit", p50=0.01, held_out=math.nan))).startswith(NOT_HERE)


def test_a_small_gain_is_not_worth_while():
    assert recommendation(results_of(run_of(), run_of("onebit", p50=0.092))).startswith(NOT_HERE)
    assert recommendation(results_of(run_of(), run_of("onebit", p50=0.09))).startswith("onebit makes")


def test_a_slower_method_is_not_worth_while():
    assert recommendation(results_of(run_of(), run_of("onebit", p50=0.2))).startswith(NOT_HERE)


def test_methods_are_measured_against_the_fastest_without_loss():
    told = recommendation(results_of(run_of(), run_of("bf16", p50=0.06), run_of("onebit", p50=0.05)))
    assert told.startswith("onebit makes a step 1.20x as fast as bf16")
    told = recommendation(results_of(run_of(), run_of("fp16", p50=0.05), run_of("onebit", p50=0.05)))
    assert told.startswith(NOT_HERE)
    assert "as fast as fp16" in told


def test_a_method_is_not_praised_where_all_others_diverged():
    diverged = {"held_out": math.nan, "loss": (math.nan, math.nan)}
    assert recommendation(results_of(run_of(**diverged), run_of("onebit", p50=0.2, **diverged))).startswith(NOT_HERE)


def test_a_run_that_was_warming_up_to_its_end_is_left_out_and_named():
    cold = [run_of(spec, p50=p50, warmed_up=False) for spec, p50 in (("topk", 0.01), ("onebit", 0.02))]
    told = recommendation(results_of(run_of(), *cold, run_of("powersgd", p50=0.05)))
    assert told.startswith("powersgd makes a step 2.00x as fast as none")
    assert told.endswith("Left out: topk, onebit, as their warm-ups do not end within the run.")
    told = recommendation(results_of(run_of(), cold[0]))
    assert told.startswith(NO_VERDICT)
    assert told.endswith("Left out: topk, as its warm-up does not end within the run.")


def test_ranks_on_one_machine_are_said_to_share_it():
    runs = run_of(), run_of("onebit")
    assert "share one machine" in recommendation(results_of(*runs))
    assert "share one machine" in recommendation(results_of(*runs, environment={"launched_by": "gradwire"}))
    for launcher in ("torchrun", "Slurm", "Open MPI"):
        assert "those of this run" in recommendation(results_of(*runs, environment={"launched_by": launcher}))
