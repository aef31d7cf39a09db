"""The checks of several ranks on one card, tried over Gloo on CPUs: they pass, and say what does not."""

import json
import sys
import tarfile

import pytest

from .__main__ import sources
from .shared_card import __main__ as command
from .shared_card.__main__ import FIRST, Results, Run, about


def ran(monkeypatch, tmp_path, part, *only):
    """The exit code of a part, and its rows."""
    arguments = ["shared_card", part, "--out", str(tmp_path), "--cpu", "--only", *only]
    monkeypatch.setattr(sys, "argv", arguments)
    code = command.main()
    return code, json.loads((tmp_path / "shared.json").read_text())["rows"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_pass_the_checks_over_gloo_and_end_behind_one_that_is_killed(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "PARTS", {"some": (Run("raw", 2), Run("trainings", 2), Run("faults", 2))})
    names = ["collectives", "hooked", "killed_rank"]
    code, rows = ran(monkeypatch, tmp_path, "some", *names)
    assert code == 0, rows
    assert [(row["check"], row["ok"]) for row in rows] == [(name, True) for name in names]
    assert rows[1]["told"] == {"hook int8": "bits"}
    assert rows[2]["told"]["exit codes"] == [1, -9]
    with tarfile.open(tmp_path / "logs.tgz") as archive:
        assert {"shared/raw-2-0-rank1.log", "shared/faults-2-0.jsonl"} <= set(archive.getnames())


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
