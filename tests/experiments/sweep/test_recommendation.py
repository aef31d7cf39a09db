import pytest

from gradwire.experiments.sweep.recommendation import Criterion, recommendations


@pytest.mark.parametrize(
    ("lossy", "expected"),
    [
        (1.0, "a: onebit has a speed-up of 2.0x over bf16: a step takes 1 s, not 2 s."),
        (
            1.95,
            "a: do not compress here beyond bf16: a step takes it 2 s, and the best other compressor, onebit, 1.95 s.",
        ),
        (None, "a: do not compress here beyond bf16: no other compressor gets there at all."),
    ],
)
def test_the_verdict_says_where_not_to_compress(lossy, expected):
    times = {"none": 3.0, "bf16": 2.0, "onebit": lossy}
    rows = [{"link": "a", "compressor": name, "seconds": seconds} for name, seconds in times.items()]
    assert list(recommendations(Criterion("seconds", ["link"]), rows)) == [f"link {expected}"]


def test_the_verdict_names_a_method_by_all_columns_that_tell_it_apart():
    rows = [
        {"compressor": name, "every": every, "seconds": seconds}
        for name, every, seconds in [("bf16", 0, 6.0), ("int4", 0, 3.0), ("int4", 8, 1.0)]
    ]
    (told,) = recommendations(Criterion("seconds", named=["compressor", "every"]), rows)
    assert told == "Here: int4, every 8 has a speed-up of 6.0x over bf16: a step takes 1 s, not 6 s."
