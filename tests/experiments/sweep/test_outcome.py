from gradwire.experiments.sweep.config import Figure, SweepConfig
from gradwire.experiments.sweep.outcome import Outcome
from gradwire.experiments.sweep.points import Finished


def test_above_a_picture_is_what_was_emulated_in_the_rows_that_it_shows():
    rows = [{"link": rate, "steps": 3, "labels": [f"{rate} links"]} for rate in ("slow", "fast")]
    outcome = Outcome(SweepConfig(title="Links", command="bench"), "", [])
    figure = Figure("slow", "bar", "link", ["steps"], where={"link": "slow"})
    assert figure.shown([*rows, {"link": "slow", "steps": None}]) == rows[:1]
    assert outcome.heading(rows) == "Links\nslow links; fast links"
    assert outcome.heading(figure.shown(rows)) == "Links\nslow links"
    assert outcome.heading(rows, "Emulated links") == "Emulated links"


def test_the_page_has_days_versions_and_processors_of_its_points_whoever_draws_it():
    machines = [{"processor": "AMD"}, {"cores": 4}, {"processor": "Intel"}]
    dates = [f"2026-01-0{day} 10:00:00 +0000" for day in (3, 1, 2)]
    versions = [("0.1.0", "2.9.0"), ("0.0.9", "2.8.0"), ("0.1.0", "2.9.0")]
    finished = [
        Finished([], {}, [], 0.1, date, gradwire, machine, torch)
        for date, machine, (gradwire, torch) in zip(dates, machines, versions, strict=True)
    ]
    outcome = Outcome(SweepConfig(command="bench"), "gradwire sweep", finished)
    assert outcome.provenance == {
        "date": "2026-01-01 to 2026-01-03",
        "gradwire": "0.0.9, 0.1.0",
        "torch": "2.8.0, 2.9.0",
        "processor": "Intel, AMD",
    }
    assert outcome.page()[-1] == "2026-01-01 to 2026-01-03, gradwire 0.0.9, 0.1.0, torch 2.8.0, 2.9.0, Intel, AMD."
    assert Outcome(SweepConfig(command="bench"), "gradwire sweep", finished[:1]).provenance["date"] == "2026-01-03"


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
