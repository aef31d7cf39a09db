import json
import shlex
import sys

import pytest

from gradwire.experiments.cli import main
from gradwire.experiments.collective import elements_of


def test_it_measures_every_size_and_writes_rows(tmp_path, capfd, monkeypatch):
    file = tmp_path / "pieces.json"
    flags = ["--nproc=2", "--elements=100,1k", "--total=2500", "--repeats=2", f"--json={file}"]
    monkeypatch.setattr(sys, "argv", ["/bin/gradwire", "collective", *flags])
    assert main(sys.argv[1:]) == 0
    document = json.loads(file.read_text())
    assert document["kind"] == "collective"
    assert document["command"] == f"gradwire collective {shlex.join(flags)}"
    assert document["config"]["total"] == "2500"
    assert [(row["elements"], row["pieces"], row["world_size"]) for row in document["rows"]] == [
        (100, 25, 2),
        (1000, 3, 2),
    ]
    for row in document["rows"]:
        assert 0 < row["seconds"]["p50"] <= row["seconds"]["p95"]
        assert row["bytes_per_second"] == pytest.approx(4 * 2500 / row["seconds"]["p50"])
    assert "all-reduce of 2,500 float32, 2 ranks, gloo" in capfd.readouterr().out


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_counts_the_repeats_on_a_terminal(terminal, started, capsys, monkeypatch):
    started()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1" * terminal)  # makes any output a terminal to rich
    assert main(["collective", "--elements=100,1k", "--total=2500", "--repeats=2"]) == 0
    shown = capsys.readouterr().out
    assert ("pieces of 1,000" in shown) == terminal
    assert ("4/4" in shown) == terminal


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--elements=many", "sizes are numbers of elements such as 100, 10k or 1M, got 'many'"),
        ("--elements=0", "sizes are at least 1 element, got 0"),
        ("--elements=70M", "a piece of 70M is larger than the total of 60M"),
        ("--elements=", "name at least one size"),
        ("--repeats=0", "repeats is at least 1, got 0"),
        ("--json=/nowhere/a.json", "there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused(wrong, message, capsys):
    assert main(["collective", wrong]) == 2
    assert message in capsys.readouterr().err


def test_sizes_are_in_powers_of_ten():
    assert [elements_of(text) for text in ("7", "1k", "6.5536M", "1G")] == [7, 1000, 6553600, 10**9]
