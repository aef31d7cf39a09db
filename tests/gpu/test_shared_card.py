"""The checks of several ranks on one card, tried over Gloo on CPUs: they pass, and say what does not."""

import json
import sys

import pytest

from .shared_card import __main__ as command
from .shared_card.__main__ import Run


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
