from gradwire.experiments.sweep.cache import Finished
from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.figure import Figure
from gradwire.experiments.sweep.outcome import Outcome


def test_above_a_picture_is_what_was_emulated_in_the_rows_that_it_shows():
    rows = [{"link": rate, "steps": 3, "labels": [f"{rate} links"]} for rate in ("slow", "fast")]
    outcome = Outcome(SweepConfig(title="Links", command="bench"), [], [])
    figure = Figure("slow", "bar", "link", ["steps"], where={"link": "slow"})
    assert figure.shown([*rows, {"link": "slow", "steps": None}]) == rows[:1]
    assert outcome.heading(rows) == "Links\nslow links; fast links"
    assert outcome.heading(figure.shown(rows)) == "Links\nslow links"


def test_rows_that_differ_have_labels_that_differ():
    cases = [{"bucket_mb": size, "overlap": overlap} for size in (None, 0.5, 25) for overlap in (False, True)]
    rows = [{"link": "1gbit", "compressor": "none", **case, "parameter": name} for case in cases for name in "ab"]
    point = Finished("", [], {}, rows, 0.1, "2026", "0.1.0", {})
    found = Outcome(SweepConfig(command="bench", grid={"link": ["1gbit"]}), [], [point]).named_rows
    labels = [label for label, _ in found]
    assert [row for _, row in found] == rows
    assert len(set(labels)) == len(rows)
    assert labels[:3] == ["1gbit none overlap False", "1gbit none overlap False #2", "1gbit none overlap True"]
    assert labels[-1] == "1gbit none bucket_mb 25 overlap True #2"
