"""Verdicts on figures: which cases are short of their goals."""

import json

import pytest

from .parts import busy_hosts, slow_steps


@pytest.mark.parametrize(
    ("bound", "misses", "figure", "most"),
    [("gpu", slow_steps, "times_the_first", 1.015), ("host", busy_hosts, "extra_a_bucket_s", 0.5e-3)],
)
def test_int8_and_int4_are_named_above_their_goals_and_not_at_them(tmp_path, bound, misses, figure, most):
    def named(worse):
        figures = {"none": 1e-9, "bf16": 1e-9, "int8": most, "int4": most * worse}
        rows = [{"case": f"gradwire:{case}@25", figure: value} for case, value in figures.items()]
        (tmp_path / f"step-{bound}.json").write_text(json.dumps({"cases": rows}))
        return [line.partition(":")[0] for line in misses(tmp_path)]

    assert named(worse=1.0) == []
    assert named(worse=1.01) == ["int4"]
