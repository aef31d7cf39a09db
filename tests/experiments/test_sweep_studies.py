"""Every study that is shipped runs in its short form, without root."""

import json
import re
from pathlib import Path

import pytest

from gradwire.experiments.cli import COMMANDS, main
from gradwire.experiments.cli.commands import CONFIGS
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.sweep import run
from gradwire.experiments.sweep.points import points_of

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "sweep.md"
STUDIES = sorted(file.stem for file in (CONFIGS / "studies").glob("*.yaml"))


@pytest.mark.parametrize("name", STUDIES)
def test_every_point_of_the_full_study_is_one_that_its_command_accepts(name):
    config = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", name])
    points = points_of(config)
    assert len({point.key() for point in points}) == len(points) > 1
    assert config.title
    assert config.source
    assert config.figures


def test_every_study_is_in_the_documentation():
    text = DOCUMENTATION.read_text()
    assert [name for name in STUDIES if f"`{name}`" not in text] == []


def test_the_study_in_the_documentation_is_one_that_is_accepted(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), flags=re.DOTALL)
    (tmp_path / "study.yaml").write_text(example)
    config = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", str(tmp_path / "study.yaml")])
    assert len({point.key() for point in points_of(config)}) == 6


@pytest.fixture
def points_in_this_process(monkeypatch):
    """Starting Python and importing torch takes longer than a short study."""

    def finish(command, limit, folder):
        assert main(command[command.index("gradwire") + 1 :]) == 0

    monkeypatch.setattr(run, "_finish", finish)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STUDIES)
def test_the_short_form_runs_and_leaves_a_page(name, tmp_path, points_in_this_process):
    pytest.importorskip("torchvision")
    assert main(["sweep", "--config", name, "--short", f"--out={tmp_path}"]) == 0
    document = json.loads((tmp_path / "study.json").read_text())
    assert document["rows"]
    assert not document["failures"]
    assert all(any(row.get(name) is not None for row in document["rows"]) for name in document["columns"])
    assert "its figures mean nothing" in (tmp_path / "README.md").read_text()
