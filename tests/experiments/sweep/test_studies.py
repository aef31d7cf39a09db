"""Every study that is shipped runs in its short form, without root."""

import multiprocessing.forkserver
import os
import re
import shlex
import tempfile
import time
from pathlib import Path

import pytest

from gradwire.experiments.cli import COMMANDS, main
from gradwire.experiments.cli.commands import CONFIGS
from gradwire.experiments.cli.parsing import configuration
from gradwire.experiments.sweep import points, run
from gradwire.experiments.sweep.command import outcome_of
from gradwire.experiments.sweep.points import points_of, read_points

from ..running import PATIENCE, descendants, stat

DOCUMENTATION = Path(__file__).parents[3] / "docs" / "sweep.md"
RESULTS = DOCUMENTATION.parent / "results"
STUDIES = sorted(file.stem for file in (CONFIGS / "studies").glob("*.yaml"))
DIFFERENT = {"adaptive", "ddp-fig2-ready", "ddp-fig6-breakdown", "p3-priority-resnet50"}
TRACES = {"/var/run/netns": "gradwire-*", "/sys/class/net": "gwl*", tempfile.gettempdir(): "gradwire-sweep-*"}
PARSED = set()  # command lines of points, but for their seeds


@pytest.fixture(autouse=True, scope="module")
def nothing_left(quick_start):
    """No process, network namespace, interface or folder outlives the studies."""
    multiprocessing.forkserver.ensure_running()  # it stays, for other tests
    before = traces()
    yield
    deadline = time.monotonic() + PATIENCE
    while (left := traces() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def traces():
    """What studies make on this machine and must take away; not what tests beside these ones have at the moment."""
    mine = {os.getpid(), *(pid for pid in descendants(os.getpid()) if stat(pid))}
    files = [file for place, pattern in TRACES.items() for file in Path(place).glob(pattern)]
    return {str(file) for file in files if not others(file.name, mine)} | {f"process {pid}" for pid in mine}


def others(name, mine):
    """Whether a name is that of a lab of a process that lives, and is none of these."""
    made_by = re.match(r"(?:gradwire-|gwl)(\d+)", name)
    return made_by is not None and bool(stat(pid := int(made_by[1]))) and pid not in mine


@pytest.fixture
def parsed_once(monkeypatch):
    """Points that differ in their seed alone are parsed once."""
    parse = points.configuration

    def once(command, prog, flags):
        words = (prog, *(flag for flag in flags if not flag.startswith("--seed=")))
        if words not in PARSED:
            parse(command, prog, flags)
            PARSED.add(words)

    monkeypatch.setattr(points, "configuration", once)


@pytest.mark.slow
@pytest.mark.usefixtures("parsed_once")
@pytest.mark.parametrize("name", STUDIES)
def test_every_point_of_the_full_study_is_one_that_its_command_accepts(name):
    config = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", name])
    keys = [point.key for point in points_of(config)]
    assert len(set(keys)) == len(keys) > 1
    assert config.title
    assert config.source
    assert config.figures
    longest = max((point.seconds for point in read_points(RESULTS / name).values()), default=0.0)
    assert config.limit > 1.4 * longest  # seconds of the committed points


def test_the_study_in_the_documentation_is_one_that_is_accepted(tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENTATION.read_text(), flags=re.DOTALL)
    (tmp_path / "study.yaml").write_text(example)
    config = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", str(tmp_path / "study.yaml")])
    assert len({point.key for point in points_of(config)}) == 6


@pytest.fixture
def points_in_this_process(monkeypatch):
    """Starting Python and importing torch takes longer than a short study."""

    def run_here(shown, command, limit, written):
        assert main(shlex.split(shown)[1:]) == 0

    monkeypatch.setattr(run, "run_to_end", run_here)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n not in DIFFERENT)) for n in STUDIES]
)
def test_the_short_form_runs_and_leaves_a_page(name, tmp_path, points_in_this_process):
    pytest.importorskip("torchvision")
    assert_short_form_runs(name, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_short_form_runs_with_points_in_processes_of_their_own(tmp_path):
    assert_short_form_runs("ddp-fig2-allreduce", tmp_path)


def assert_short_form_runs(name, out):
    assert main(["sweep", "--config", name, "--short", f"--out={out}"]) == 0
    config = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", name, "--short"])
    outcome = outcome_of(config, out, "")
    assert outcome.rows
    assert "failed" not in (out / "README.md").read_text()
    assert all(any(row.get(name) is not None for row in outcome.rows) for name in outcome.columns)
    assert sorted(picture.name for picture in out.glob("*.png")) == sorted(drawable(name, outcome.rows))
    assert all(picture.stat().st_size for picture in out.glob("*.png"))
    assert all(point.gradwire and point.torch for point in read_points(out).values())
    page = (out / "README.md").read_text()
    assert "its figures mean nothing" in page


def drawable(name, rows):
    """The pictures of those figures of a study for which any row has all columns."""
    figures = configuration(COMMANDS["sweep"], "gradwire sweep", ["--config", name]).drawn
    return [
        f"{figure.name}.png"
        for figure in figures
        if any(fits(figure.where, row) and None not in map(row.get, figure.columns) for row in rows)
    ]


def fits(where, row):
    """Whether a row has the wanted values, of which a list means any of it."""
    return all(row.get(name) in (value if isinstance(value, list) else [value]) for name, value in where.items())
