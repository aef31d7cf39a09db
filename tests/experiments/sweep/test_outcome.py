from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.outcome import Outcome
from gradwire.experiments.sweep.points import Finished


def test_the_table_shows_the_rows_that_the_study_wants_and_intervals_of_differences():
    derive = {"excess": {"kind": "ratio", "of": "loss", "against": {"compressor": "bf16"}, "percent": True}}
    losses = {"bf16": (2.0, 2.2, 2.1), "int4": (2.01, 2.2, 2.1), "powersgd": (2.2, 2.42, 2.331)}
    rows = [
        {"compressor": name, "seed": seed, "rate": None, "loss": loss}
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    timed = [{"compressor": "bf16", "rate": "slow", "loss": 9.0}]
    config = SweepConfig(
        command="compare",
        grid=[{"seed": [0, 1, 2], "rate": ["slow"], "compressors": [["bf16"]]}],
        mean_over=["seed"],
        derive=derive,
        where={"rate": None},
        columns=["compressor", "excess"],
    )
    points = [Finished([], {}, each, 0.1, "2026-01-01", "", {}, "") for each in (rows, timed)]
    outcome = Outcome(config, "", points)
    lines = [line for line in outcome.page() if line.startswith("| ")][2:]
    assert lines == ["| bf16 | 0 |", "| int4 | no difference seen (+0.2 ± 0.7 %) |", "| powersgd | +10.3 ± 1.4 % |"]
    assert len(outcome.rows) == 4
