import statistics

import pytest

from gradwire.experiments.sweep.columns import derived, means


def test_rows_of_other_data_are_not_compared():
    rows = [{"compressor": "none", "loss": 2.0, "data.source": "monday"}, {"compressor": "int4", "loss": 3.0}]
    described = {"excess": {"kind": "ratio", "of": "loss", "against": {"compressor": "none"}}}
    for source, excess in (("monday", 1.5), (None, 1.5), ("tuesday", None)):
        rows[1]["data.source"] = source
        assert derived(rows, described, ["compressor"])[1]["excess"] == excess


def test_a_speedup_is_against_the_row_at_the_same_place():
    rows = [
        {"link": link, "compressor": name, "seconds": seconds}
        for link, name, seconds in [("a", "none", 4.0), ("a", "onebit", 1.0), ("b", "none", 6.0), ("b", "onebit", 3.0)]
    ]
    found = derived(rows, {"speedup": {"of": "seconds", "against": {"compressor": "none"}}}, ["link", "compressor"])
    assert [row["speedup"] for row in found] == [1, 4, 1, 2]


def test_time_to_loss_is_when_the_smoothed_loss_gets_to_the_reference_s_last():
    rows = [
        {"compressor": "bf16", "loss": [2.0, 2.0, 2.0], "train_seconds": [1.0, 2.0, 3.0]},
        {"compressor": "quick", "loss": [3.0, 0.5, 0.5], "train_seconds": [0.1, 0.2, 0.3]},
        {"compressor": "never", "loss": [3.0, 3.0, 3.0], "train_seconds": [0.1, 0.2, 0.3]},
        {"compressor": "broken", "loss": [3.0, None, None], "train_seconds": [0.1, 0.2, 0.3]},
        {"compressor": "untimed", "loss": [3.0, 0.5, 0.5]},
    ]
    found = derived(rows, {"time": {"kind": "time_to_loss", "against": {"compressor": "bf16"}}}, ["compressor"])
    assert [row["time"] for row in found] == [1.0, 0.2, "never", "never", None]


def test_a_speed_up_of_what_is_never_reached_is_none_and_a_mean_with_it_is_never():
    rows = [
        {"compressor": name, "seed": seed, "time": time}
        for name, seed, time in (("bf16", 0, 4.0), ("bf16", 1, 5.0), ("int4", 0, 2.0), ("int4", 1, "never"))
    ]
    described = {"speedup": {"of": "time", "against": {"compressor": "bf16"}}}
    found = means(derived(rows, described, ["compressor", "seed"]), ["seed"], ["compressor", "seed"], [])
    assert [(row["time"], row["speedup"]) for row in found] == [(4.5, 1.0), ("never", None)]


def test_the_loss_at_the_end_is_told_in_steps_of_another_row():
    rows = [
        {"compressor": "bf16", "loss": [4.0, 3.0, 2.0, 1.0]},
        {"compressor": "ahead", "loss": [4.0, 3.0, 2.0, 0.5]},
        {"compressor": "behind", "loss": [4.0, 3.0, 2.0]},
        {"compressor": "far behind", "loss": [5.0, 4.5]},
        {"compressor": "broken", "loss": [4.0, None]},
    ]
    found = derived(rows, {"as_after": {"against": {"compressor": "bf16"}}}, ["compressor"])
    assert [row["as_after"] for row in found] == [4, 4, 3, 1, None]


def test_a_loss_that_another_row_has_for_a_moment_is_not_yet_its_own():
    rows = [{"compressor": "bf16", "loss": [4.0, 1.0, 6.0, 1.0, 1.0]}, {"compressor": "int4", "loss": [2.6] * 5}]
    found = derived(rows, {"as_after": {"against": {"compressor": "bf16"}}}, ["compressor"])
    assert found[1]["as_after"] == 5


def test_a_simulated_training_takes_the_steps_of_a_shorter_run_and_then_the_mean_of_its_second_half():
    rows = [{"compressor": "int8", "seed": seed, "steps": 6, "rate": None, "speed": 0.1} for seed in (0, 1)] + [
        {"compressor": "int8", "steps": 4, "rate": "slow", "train_seconds": [9.0, 10.0, 12.0, 15.0], "speed": 2.0}
    ]
    against = {"rate": "slow", "seed": None}
    described = {
        "ends": {"kind": "seconds_of_steps", "against": against},
        "lab": {"kind": "looked_up", "of": "speed", "against": against},
        "seconds": {"kind": "last", "of": "ends"},
    }
    found = derived(rows, described, ["compressor", "seed", "rate"])
    assert [row["ends"] for row in found[:2]] == [[9.0, 10.0, 12.0, 15.0, 17.5, 20.0]] * 2
    assert found[2]["ends"] == [9.0, 10.0, 12.0, 15.0]
    assert [row["lab"] for row in found] == [2.0] * 3
    assert [row["seconds"] for row in found] == [20.0, 20.0, 15.0]


def test_an_excess_in_per_cent_is_against_the_row_at_the_same_place():
    rows = [{"compressor": "none", "loss": 2.0}, {"compressor": "int4", "loss": 2.01}]
    excess = {"kind": "ratio", "of": "loss", "against": {"compressor": "none"}, "percent": True}
    assert [row["excess"] for row in derived(rows, {"excess": excess}, ["compressor"])] == pytest.approx([0, 0.5])


def test_seconds_over_a_link_are_those_of_computation_and_of_bytes_sent_so_far():
    row = {"steps": 3, "step_seconds.p50": 0.5, "sent_bytes_per_step": 125_000, "total_sent_bytes": 1_500_000}
    (found,) = derived([row], {"seconds": {"kind": "seconds_over_link", "rate": "1mbit"}}, [])
    dense = 1_500_000 - 2 * 125_000  # what the warm-up sent, all of it by the first step
    assert found["seconds"] == pytest.approx([0.5 + 8e-6 * dense, 1 + 8e-6 * dense + 1, 1.5 + 8e-6 * dense + 2])


def test_a_ratio_is_over_another_column_or_the_same_one_of_another_row():
    rows = [{"ranks": ranks, "samples": 8.0, "seconds": seconds} for ranks, seconds in ((1, 2.0), (2, 4.0), (4, None))]
    described = {
        "rate": {"kind": "ratio", "of": "samples", "over": "seconds"},
        "slowdown": {"kind": "ratio", "of": "seconds", "against": {"ranks": 1}},
        "lost": {"kind": "ratio", "of": "seconds", "against": {"ranks": 8}},
    }
    found = derived(rows, described, ["ranks"])
    assert [(row["rate"], row["slowdown"], row["lost"]) for row in found] == [(4, 1, None), (2, 2, None), (None,) * 3]


def rows(**columns):
    count = len(next(iter(columns.values())))
    return [{"spec": "int8", "seed": seed, **{k: v[seed] for k, v in columns.items()}} for seed in range(count)]


def test_numbers_become_their_mean_and_standard_deviation():
    losses = [1.0, 2.0, 4.5]
    (found,) = means(rows(loss=losses), ["seed"], ["spec", "seed"], [])
    assert found == {
        "spec": "int8",
        "loss": pytest.approx(sum(losses) / 3),
        "loss.spread": pytest.approx(statistics.stdev(losses)),
        "loss.interval": pytest.approx(4.303 * statistics.stdev(losses) / 3**0.5, rel=1e-3),
        "runs": 3,
    }


def test_curves_that_are_drawn_are_averaged_and_others_left_out():
    (found,) = means(rows(loss=[[1.0, 2.0], [3.0, None]], seconds=[[1.0], [2.0]]), ["seed"], ["spec"], ["loss"])
    assert found == {"spec": "int8", "loss": [2.0, None], "runs": 2}
