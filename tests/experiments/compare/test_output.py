import statistics
from dataclasses import replace

import pytest

from gradwire.experiments.compare.command import write_output
from gradwire.experiments.results import Results
from gradwire.experiments.results.seeds import over_seeds

from ..given import results_of, run_of


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
