import statistics
import sys
from dataclasses import replace

import pytest

from gradwire.experiments.compare.command import write_output
from gradwire.experiments.results import Results, picture
from gradwire.experiments.results.seeds import over_seeds

from ..given import results_of, run_of, timed_run

PICTURES, REPORT = {"loss.png", "tradeoff.png"}, {"report.html"}


def written(folder):
    return {file.name for file in folder.iterdir()}


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


def test_several_seeds_give_means_and_intervals_in_the_table_the_report_and_the_file(tmp_path, capsys):
    losses = {"bf16": (2.0, 2.2, 2.1), "int4": (2.02, 2.222, 2.121), "topk": (2.0, 2.3, 2.1)}
    runs = [
        replace(run_of(name, held_out=loss), seed=seed)
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]
    results = results_of(*runs)
    results = replace(results, over_seeds=over_seeds(results))
    rows = {row["compressor"]: row for row in results.over_seeds}
    assert rows["bf16"]["percent"] is None
    assert (rows["int4"]["seeds"], rows["int4"]["against"]) == (3, "bf16")
    assert rows["int4"]["percent"] == pytest.approx(1.0)
    assert rows["topk"]["interval"] == pytest.approx(
        4.303 * statistics.stdev([0, 100 * 0.1 / 2.2, 0]) / 3**0.5, rel=1e-3
    )
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json").runs == results.runs
    write_output(results, tmp_path)
    shown = capsys.readouterr().out
    assert "+1.0 ± 0.0 %" in shown
    assert "± 6.5 %)" in shown
    assert "no difference seen (" in shown
    assert (
        "topk: mean validation loss of 3 seeds 2.133, against bf16 no difference seen"
        in (tmp_path / "report.html").read_text()
    )
    assert over_seeds(results_of(run_of())) == ()
