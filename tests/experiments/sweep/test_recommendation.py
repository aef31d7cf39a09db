import pytest

from gradwire.experiments.sweep.recommendation import Criterion, recommendations


@pytest.mark.parametrize(
    ("lossy", "expected"),
    [
        (1.0, "a: onebit is 2.0x as fast as bf16: a step takes 1 s, not 2 s."),
        (1.95, "a: do not compress here beyond bf16: a step takes it 2 s, and the best other method, onebit, 1.95 s."),
        (None, "a: do not compress here beyond bf16: no other method gets there at all."),
    ],
)
def test_the_verdict_says_where_not_to_compress(lossy, expected):
    times = {"none": 3.0, "bf16": 2.0, "onebit": lossy}
    rows = [{"link": "a", "compressor": name, "seconds": seconds} for name, seconds in times.items()]
    assert list(recommendations(Criterion("seconds", ["link"]), rows)) == [f"link {expected}"]
