import sys
from dataclasses import replace

import pytest

from gradwire.experiments.compare.command import write_output
from gradwire.experiments.results import picture

from ..given import results_of, run_of, timed_run

PICTURES, REPORT = {"loss.png", "tradeoff.png"}, {"report.html"}


def written(folder):
    return {file.name for file in folder.iterdir()}


def test_it_shows_all_and_says_where_it_is(tmp_path, capsys):
    write_output(results_of(run_of(), run_of("onebit")), tmp_path)
    shown = capsys.readouterr().out
    assert written(tmp_path) == PICTURES | REPORT
    assert f"pictures   {tmp_path / 'loss.png'}, {tmp_path / 'tradeoff.png'}" in shown
    assert f"report     {tmp_path / 'report.html'}" in shown


def test_it_shows_the_options_that_suit_the_optimizer(tmp_path, capsys):
    tuned = replace(run_of("int4"), tuned="int4:error_feedback=false")
    results = results_of(run_of(), tuned, config={"optimizer": "adamw"})
    write_output(results, tmp_path)
    line = "As attach(..., optimizer=optimizer) does for adamw: int4 trains as int4:error_feedback=false."
    assert line in capsys.readouterr().out.splitlines()
    assert line in (tmp_path / "report.html").read_text()
    write_output(results_of(run_of("int4")), tmp_path)
    assert "As attach" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("library", "module", "what", "left"),
    [("matplotlib", "results.picture", "pictures", REPORT), ("jinja2", "report", "report", PICTURES)],
)
def test_without_a_library_a_line_tells_how_to_get_it_below_table_and_verdict(
    library, module, what, left, tmp_path, capsys, monkeypatch
):
    for name in [each for each in sys.modules if each.startswith(f"gradwire.experiments.{module}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    write_output(results_of(*(timed_run(spec, [1.0] * 6) for spec in ("none", "onebit"))), tmp_path)
    shown = capsys.readouterr().out
    line = f"{what:<11}none: {library} is not installed; pip install 'gradwire[experiments]'"
    assert shown.index("accuracy") < shown.index("No difference measured.") < shown.index(line)
    assert written(tmp_path) == left


def test_the_table_is_there_before_anything_is_drawn(tmp_path, capsys, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(picture, "draw", full)
    with pytest.raises(OSError, match="No space left"):
        write_output(results_of(run_of()), tmp_path)
    assert "accuracy" in capsys.readouterr().out
