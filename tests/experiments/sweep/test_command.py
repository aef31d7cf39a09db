import sys

import pytest

from gradwire.experiments.sweep.points import POINTS

from .given import shown, sweep, with_key

pytestmark = pytest.mark.usefixtures("undrawn")


def test_a_study_runs_every_point_of_the_grid_and_leaves_rows_page_and_pictures(
    study, ran, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["gradwire", "sweep", "--config", "FILE", "--out", str(out), "--redraw"])
    assert sweep(study, out) == 0
    assert ran == [10, 100, 1000]
    assert {file.name for file in out.iterdir()} == {POINTS, "rows.csv", "README.md", "pieces.png"}
    assert [row["slowdown"] for row in shown(out)] == ["100", "10", "1"]
    page = (out / "README.md").read_text()
    assert "![Smaller is slower.](pieces.png)" in page
    assert f"$ gradwire sweep --config FILE --out {out}\n" in page
    assert "[points.jsonl](points.jsonl)" in page
    assert "| 1,000 |" in page.replace("1000", "1,000")
    printed = capsys.readouterr().out
    assert "3 points of gradwire collective, 0 of them already" in printed
    assert "slowdown" in printed


def test_a_second_run_computes_only_what_is_missing(study, ran, tmp_path):
    out = tmp_path / "out"
    assert sweep(study, out, "--short") == 0
    assert ran == [1000]
    assert sweep(study, out) == 0
    assert ran == [1000, 10, 100]
    assert [row["elements"] for row in shown(out)] == ["10", "100", "1000"]


def test_a_failed_point_is_told_and_runs_again_next_time_while_the_others_are_kept(study, ran, tmp_path, capsys):
    out = tmp_path / "out"
    ran.fails = (100,)
    assert sweep(study, out) == 1
    assert "failed: elements 100: ended with exit code 3" in capsys.readouterr().out
    assert "- failed: elements 100" in (out / "README.md").read_text()
    ran.fails = ()
    assert sweep(study, out) == 0
    assert ran == [10, 100, 1000, 100]
    assert "failed" not in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("grid: {elements: []}", "grid.elements has no value: name at least one"),
        ("grid: {element: [10]}", "the point element 10: unknown option --element (did you mean --elements?)"),
        ("command: colective", "command is one of bench, collective, compare, ready, got 'colective'"),
        ("derive: {speed: {of: seconds.p50}}", "derive.speed has the unknown kind 'speed'; there are: speedup, ratio"),
        ("figures: [{name: a, kind: pie, x: b, y: c}]", "kind is one of line, bar, points, got 'pie'"),
        ("figures: [{name: a, kind: bar, x: b, y: c, log: [z]}]", "log has x and y, got z"),
        ("base: {netlab.utilization: use.json}", "netlab.utilization is for points of bench"),
        ("figures: [{name: a, kind: line, x: b, y: [c, d]}]", "several y lie on top of each other in bars"),
        ("derive: {late: {kind: seconds_over_link, rate: fast}}", "a rate is a number and a unit"),
    ],
    ids=lambda value: value.partition(":")[0],
)
def test_what_a_study_says_wrong_is_refused_before_anything_runs(wrong, message, study, ran, tmp_path, capsys):
    study.write_text(with_key(wrong))
    assert sweep(study, tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not ran
    assert not (tmp_path / "out").exists()
