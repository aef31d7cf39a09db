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
