import pytest

from gradwire.experiments.sweep.derive import derived


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
    assert [row["time"] for row in found] == [1.0, 0.2, None, None, None]


def test_time_to_loss_can_be_to_what_the_reference_has_earlier():
    rows = [
        {"compressor": "bf16", "loss": [4.0, 3.0, 2.0, 1.0], "train_seconds": [1.0, 2.0, 3.0, 4.0]},
        {"compressor": "int4", "loss": [4.5, 3.2, 2.2, 1.2], "train_seconds": [0.1, 0.2, 0.3, 0.4]},
    ]
    described = {"kind": "time_to_loss", "against": {"compressor": "bf16"}, "at": 0.5}
    assert [row["time"] for row in derived(rows, {"time": described}, ["compressor"])] == [2.0, 0.3]


def test_an_excess_in_per_cent_is_against_the_row_at_the_same_place():
    rows = [{"compressor": "none", "loss": 2.0}, {"compressor": "int4", "loss": 2.01}]
    excess = {"kind": "ratio", "of": "loss", "against": {"compressor": "none"}, "percent": True}
    assert [row["excess"] for row in derived(rows, {"excess": excess}, ["compressor"])] == pytest.approx([0, 0.5])


def test_seconds_over_a_link_are_those_of_computation_and_of_bytes_sent_so_far():
    row = {"steps": 3, "step_seconds.p50": 0.5, "sent_bytes_per_step": 125_000, "total_sent_bytes": 1_500_000}
    (found,) = derived([row], {"seconds": {"kind": "seconds_over_link", "rate": "1mbit"}}, [])
    dense = 1_500_000 - 2 * 125_000  # what the warm-up sent, all of it by the first step
    assert found["seconds"] == pytest.approx([0.5 + 8e-6 * dense, 1 + 8e-6 * dense + 1, 1.5 + 8e-6 * dense + 2])


def test_without_bytes_there_are_no_seconds_over_a_link():
    row = {"steps": 3, "step_seconds.p50": 0.5, "sent_bytes_per_step": 1}
    (found,) = derived([row], {"seconds": {"kind": "seconds_over_link", "rate": "1mbit"}}, [])
    assert found["seconds"] is None


def test_a_ratio_is_over_another_column_or_the_same_one_of_another_row():
    rows = [{"ranks": ranks, "samples": 8.0, "seconds": seconds} for ranks, seconds in ((1, 2.0), (2, 4.0), (4, None))]
    described = {
        "rate": {"kind": "ratio", "of": "samples", "over": "seconds"},
        "slowdown": {"kind": "ratio", "of": "seconds", "against": {"ranks": 1}},
        "lost": {"kind": "ratio", "of": "seconds", "against": {"ranks": 8}},
    }
    found = derived(rows, described, ["ranks"])
    assert [(row["rate"], row["slowdown"], row["lost"]) for row in found] == [(4, 1, None), (2, 2, None), (None,) * 3]
