"""gradwire top, on reports that a test has written."""

import json
import os
import time

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.top import LEAST, ranks_in, states_of

NUMBERS = {"step_seconds": 0.05, "compute_seconds": 0.04, "exposed_seconds": 0.01, "wait_seconds": 0.02}


def written(folder, rank, step=200, age=0.0, ranks=3, every=100, **numbers):
    metrics = {**NUMBERS, "sent_bytes": 1_200_000.0, "ratio": 20.0, **numbers}
    told = {"rank": rank, "ranks": ranks, "host": f"node{rank}", "every": every, "step": step}
    path = folder / f"rank-{rank:05}.json"
    path.write_text(json.dumps({**told, "compressor": "topk", "metrics": metrics}))
    os.utime(path, (1000.0 - age, 1000.0 - age))


def test_who_computes_longer_is_slow_who_is_silent_is_stale_and_who_is_late_is_behind(tmp_path):
    written(tmp_path, 0)
    written(tmp_path, 1, compute_seconds=0.08)
    written(tmp_path, 2, age=31.0, compute_seconds=0.2)
    written(tmp_path, 10, step=50)
    states = states_of(ranks_in(tmp_path, 1000.0))
    assert states == ["", "slow, computes 2.00x", "stale, reported 31 s ago", "150 steps behind"]


@pytest.mark.parametrize(("seconds", "every", "age"), [(0.05, 100, 3 * 0.05 * 100), (0.001, 10, LEAST)])
def test_a_rank_is_stale_after_three_times_of_its_reports_and_at_least_ten_seconds(seconds, every, age, tmp_path):
    for rank, since in enumerate((age - 0.1, age + 0.1)):
        written(tmp_path, rank, age=since, step_seconds=seconds, every=every)
    assert [rank.stale for rank in ranks_in(tmp_path, 1000.0)] == [False, True]


def test_once_prints_a_row_a_rank_and_ends(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    for rank in range(2):
        written(tmp_path, rank)
        os.utime(tmp_path / f"rank-{rank:05}.json", (time.time(), time.time()))
    assert main(["top", str(tmp_path), "--once=true"]) == 0
    shown = capsys.readouterr().out
    assert "topk, 3 ranks, 1 of them silent" in shown
    row = next(line for line in shown.splitlines() if "node1" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["1", "node1", "200", "20.00", "50.0 ms", "40.0 ms", "10.0 ms", "20.0 ms", "1.2 MB", "20.00", ""]


FOREIGN = {
    "no keys": dict.fromkeys(("rank", "ranks", "host", "every", "step", "compressor", "metrics")),
    "metrics of text": {"metrics": {"step_seconds": "fast"}},
    "a number too large": {"metrics": {"sent_bytes": 10**400}},
    "no number": {"metrics": {"sent_bytes": float("nan")}},
    "a host of numbers": {"host": 7},
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_file_that_is_no_report_is_left_out(foreign, tmp_path, capsys, caplog):
    written(tmp_path, 0)
    path = tmp_path / "rank-00000.json"
    whole = json.loads(path.read_text())
    (tmp_path / "rank-00001.json").write_text(json.dumps({**whole, **FOREIGN[foreign]}))
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "rank-00001.json is left out: " in caplog.text
    path.unlink()
    assert main(["top", str(tmp_path), "--once"]) == 2
    assert "has no report of a rank" in capsys.readouterr().err


def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path):
    written(tmp_path, 0)
    os.mkfifo(tmp_path / "rank-00001.json")
    assert len(ranks_in(tmp_path, 1000.0)) == 1


def test_a_report_s_texts_are_shown_as_they_are(tmp_path, capsys):
    written(tmp_path, 0)
    path = tmp_path / "rank-00000.json"
    texts = {"host": "[/red]", "compressor": "[bold]topk[/x]\x1b[2J"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **texts}))
    assert main(["top", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "[bold]topk[/x]?[2J" in shown
    assert "\x1b" not in shown
