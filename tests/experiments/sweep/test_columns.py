import pytest
import yaml

from gradwire.experiments.sweep.config import SweepConfig
from gradwire.experiments.sweep.rows import check_columns

from .given import STUDY, sweep, with_key


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("columns: [elements, second.p50]", "second.p50"),
        ("derive: {slowdown: {kind: ratio, of: seconds.p5, against: {element: 10}}}", "seconds.p5, element"),
        ("derive: {late: {kind: ratio, of: early, over: elements}}", "early"),
        ("derive: {reached: {kind: time_to_loss, seconds: second, against: {rank: 10}}}", "second, rank"),
        (
            "figures: [{name: a, kind: line, x: element, y: p50, series: backed, bounds: {a: low}, where: {rank: 0}}]",
            "backed, element, p50, rank, low",
        ),
        ("verdict: {of: second, each: [link]}", "second, link, compressor"),
    ],
    ids=lambda value: value.partition(":")[0],
)
def test_a_column_that_neither_rows_nor_derivations_have_is_refused_with_those_there_are(wrong, named):
    config = SweepConfig(**yaml.safe_load(with_key(wrong)))
    with pytest.raises(ValueError, match="Mend the study and run it again") as refused:
        check_columns(config.named, config.command, [{"elements": 10, "backend": "gloo", "seconds.p50": 0.1}])
    there = "there are: elements, backend, seconds.p50. "
    assert f"without columns that the study names: {named}; {there}" in str(refused.value)


def test_columns_are_checked_at_the_first_rows_and_a_study_that_was_mended_goes_on(study, ran, tmp_path, capsys):
    study.write_text(with_key("columns: [elements, second.p50]"))
    ran.fails = (10,)
    for _ in range(2):
        assert sweep(study, tmp_path) == 2
        assert "second.p50; there are: elements, backend, seconds.p50" in capsys.readouterr().err
        assert ran == [10, 100]
    study.write_text(STUDY)
    ran.fails = ()
    assert sweep(study, tmp_path) == 0
    assert ran == [10, 100, 10, 1000]


def test_a_column_that_some_rows_lack_may_be_named():
    figure = {"name": "use", "kind": "line", "x": "link.seconds", "y": "link.sent_mbit", "series": "bucket_mb"}
    columns = ["compressors", "bucket_mb", "later", "later.spread", "runs"]
    config = SweepConfig(command="bench", columns=columns, figures=[figure], verdict={"of": "later"})
    check_columns(config.named, "bench", [{"compressor": "none", "bucket_mb": None}, {"later": 1.0}])
    with pytest.raises(ValueError, match=r"names: later, later.spread; there are: compressor, bucket_mb\."):
        check_columns(config.named, "bench", [{"compressor": "none", "bucket_mb": None}])
