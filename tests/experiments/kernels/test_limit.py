"""All measurements together keep to a limit, and those left out are named."""

from gradwire.experiments.cli import main
from gradwire.experiments.kernels.bench import Group, Limit

from .given import SIZE, named


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def groups(*sizes):
    cases = [named("sign_pack"), named("all_finite")]
    return [Group(case, size, "fp32", (1,), ("reference",)) for size in sizes for case in cases]


def measured(limit, clock, each, seconds_per_element):
    """The groups that the limit admits, each of which takes its time."""
    found = []
    for group in limit.admit(each):
        clock.now += seconds_per_element * group.elements
        found.append((group.case.name, group.elements))
    return found


def test_what_would_end_after_the_limit_by_its_time_at_a_smaller_size_is_left_out():
    clock = Clock()
    limit = Limit(60.0, clock)
    found = measured(limit, clock, groups(1_000, 5_000, 50_000), 0.002)  # 4 s, 20 s and 200 s
    assert found == [(name, size) for size in (1_000, 5_000) for name in ("sign_pack", "all_finite")]
    assert clock.now - 100 <= 60
    (line,) = limit.told()
    assert line.endswith(": 50,000 elements of fp32: sign_pack, all_finite")
    assert "60 s" in line
    assert "--all" in line


def test_the_command_says_what_it_left_out_and_all_lifts_the_limit(capsys):
    quick = ["--sizes", str(SIZE), "--repeats", "3", "--seconds", "0", "--threads", "1", "--device", "cpu"]
    quick += ["--operations", "sign_pack,all_finite", "--backends", "reference"]
    assert main(["kernels", *quick, "--limit", "1e-9"]) == 2
    assert "the limit of 1e-09 s was reached (--all lifts it" in capsys.readouterr().err
    assert main(["kernels", *quick, "--limit", "1e-9", "--all"]) == 0
    assert "limit" not in capsys.readouterr().out
    assert main(["kernels", "--limit", "0"]) == 2
    assert "limit is above 0 seconds, got 0.0; --all sets none" in capsys.readouterr().err
