"""The checks of several ranks on one card, tried over Gloo on CPUs: they pass, and say what does not."""

import json
import shutil
import signal
import sys
import tarfile

import pytest

from .__main__ import sources
from .shared_card import __main__ as command
from .shared_card.__main__ import FIRST, Results, Run, about
from .shared_card.checks import checks_in


def ran(monkeypatch, tmp_path, part, *only):
    """The exit code of a part, and its rows."""
    arguments = ["shared_card", part, "--out", str(tmp_path), "--cpu", "--only", *only]
    monkeypatch.setattr(sys, "argv", arguments)
    code = command.main()
    return code, json.loads((tmp_path / "shared.json").read_text())["rows"]


TRIED = {Run(file, 4): () for file in ("raw", "trainings", "changes", "sharded")}
TRIED |= {Run("faults", 2): (), Run("times", 2): ("step_times",), Run("times", 2, pace=1): ("pace",)}


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize(("run", "only"), TRIED.items(), ids=[run.label for run in TRIED])
def test_ranks_pass_the_checks_over_gloo(monkeypatch, tmp_path, run, only):
    if run.pace and not (sys.platform == "linux" and shutil.which("cc")):
        pytest.skip("only Linux paces sockets, and a C compiler makes what asks it to")
    monkeypatch.setattr(command, "PARTS", {"tried": (run,)})
    code, rows = ran(monkeypatch, tmp_path, "tried", *only)
    assert code == 0, rows
    assert [(row["check"], row["ok"]) for row in rows] == [
        (name, True) for name in only or checks_in(run.file, run.ranks)
    ]
    told = {row["check"]: row["told"] for row in rows}
    assert told.get("hooked", {"hook int8": "bits"}) == {"hook int8": "bits"}
    for name, code in (("killed_rank", -signal.SIGKILL), ("raising_rank", 3)):
        assert name not in told or told[name]["exit codes"] == [1, code]
    with tarfile.open(tmp_path / "logs.tgz") as archive:
        assert f"shared/{run.label}-0-rank1.log" in archive.getnames()


def test_a_later_part_finds_the_rows_of_an_earlier_one_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    Results(tmp_path / "shared.json", about(True)).add(FIRST, {"check": "collectives", "ok": True})
    assert Results(tmp_path / "shared.json", about(True)).done(FIRST) == {"collectives"}


def test_rows_of_other_sources_do_not_count_and_results_beside_sources_change_nothing(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cu").write_text("1")
    before = sources(tmp_path)
    (tmp_path / "kernels" / "shared.json").write_text("{}")
    assert sources(tmp_path) == before
    (tmp_path / "kernels" / "a.cu").write_text("2")
    assert sources(tmp_path) != before
