import pytest
import yaml

from gradwire.experiments.sweep.columns import check_columns
from gradwire.experiments.sweep.config import SweepConfig

from .given import STUDY, sweep, with_key


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("columns: [elements, second.p50]", "second.p50 (columns)"),
        (
            "derive: {slowdown: {kind: relative, of: seconds.p5, against: {element: 10}}}",
            "seconds.p5 (derive.slowdown), element (derive.slowdown)",
        ),
        (
            "derive: {late: {kind: quotient, of: early, over: elements}, early: {kind: quotient, of: x, over: elements}}",
            "early (derive.late), x (derive.early)",
        ),
        (
            "derive: {seconds_to_target: {kind: time_to_loss, against: {elements: 10}}}",
            "loss (derive.seconds_to_target), train_seconds (derive.seconds_to_target)",
        ),
        (
            "figures: [{name: a, kind: line, x: element, y: p50, series: backends, spread: [low, high], where: {rank: 0}}]",
            "backends (figure a), element (figure a), p50 (figure a), low (figure a), high (figure a), rank (figure a)",
        ),
        ("verdict: {of: second, each: [link]}", "second (verdict), link (verdict), compressor (verdict)"),
    ],
    ids=lambda value: value.partition(":")[0],
)
def test_a_column_that_neither_rows_nor_derivations_have_is_refused_with_those_there_are(wrong, named):
    config = SweepConfig(**yaml.safe_load(with_key(wrong)))
    with pytest.raises(ValueError, match="Mend the study and run it again") as refused:
        check_columns(config, [{"elements": 10, "backend": "gloo", "seconds.p50": 0.1}])
    there = ", ".join(["there are: elements", "backend", "seconds.p50", *config.derive])
    assert f"without columns that the study names: {named}; {there}. " in str(refused.value)


def test_columns_are_checked_at_the_first_rows_and_a_study_that_was_mended_goes_on(study, ran, tmp_path, capsys):
    study.write_text(with_key("columns: [elements, second.p50]"))
    ran.fails = (10,)
    for _ in range(2):
        assert sweep(study, tmp_path) == 2
        assert "second.p50 (columns); there are: elements, backend, seconds.p50, slowdown" in capsys.readouterr().err
        assert ran == [10, 100]
    study.write_text(STUDY)
    ran.fails = ()
    assert sweep(study, tmp_path) == 0
    assert ran == [10, 100, 10, 1000]


def test_a_column_that_some_rows_lack_may_be_named():
    figure = {"name": "use", "kind": "line", "x": "link.seconds", "y": "link.sent_mbit", "series": "bucket_mb"}
    columns = ["compressors", "stretch", "bucket_mb", "later"]
    config = SweepConfig(command="bench", columns=columns, figures=[figure], verdict={"of": "later"})
    check_columns(config, [{"compressor": "none", "bucket_mb": None}, {"later": 1.0}])
    check_columns(config, [])
    with pytest.raises(ValueError, match=r"later \(columns\), later \(verdict\); there are: compressor, bucket_mb\."):
        check_columns(config, [{"compressor": "none", "bucket_mb": None}])
