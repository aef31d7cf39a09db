import dataclasses
import json
import math
import re
from html import unescape

import pytest

from gradwire.experiments.results.comparison import Results
from gradwire.experiments.results.picture import draw
from gradwire.experiments.results.report import write_report

from ..given import results_of, run_of

PNG = b"\x89PNG\r\n\x1a\n"


def written(results, folder):
    results.write(folder / "results.json")
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def test_what_is_written_is_read_again(tmp_path):
    results = results_of(run_of(), run_of("topk:ratio=0.1", sent=400.0))
    results.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == results


def test_runs_on_several_networks_are_a_comparison_for_each_in_the_order_run():
    over = [dataclasses.replace(run_of(spec), network=name) for name in ("slow", "fast") for spec in ("none", "bf16")]
    found = results_of(*over, environment={"network": "slow, then fast", "device": "cpu"}).by_network()
    assert [each.ranks for each in found] == ["2 ranks, gloo on cpu, slow", "2 ranks, gloo on cpu, fast"]
    assert [each.runs for each in found] == [tuple(over[:2]), tuple(over[2:])]


def test_a_number_that_is_not_finite_is_null_in_the_file_and_nan_when_read(tmp_path):
    results = results_of(run_of(loss=(3.0, math.nan, math.inf), held_out=math.nan, accuracy=0.1))
    (run,) = written(results, tmp_path)["runs"]
    assert run["loss"] == [3.0, None, None]
    assert run["eval"] == {"loss": None, "accuracy": 0.1}
    (read,) = Results.read(tmp_path / "results.json").runs
    assert read.loss[0] == 3.0
    assert all(map(math.isnan, (*read.loss[1:], read.eval.loss)))


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "results.json"
    results_of(run_of()).write(file)
    before = file.read_bytes()
    with pytest.raises(TypeError):
        results_of(run_of(), config={"steps": object()}).write(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "runs",
    [
        [run_of()],
        [run_of(loss=(math.nan, math.nan), held_out=math.nan, accuracy=math.nan)],
        [run_of(f"powersgd:rank={rank}", sent=4000 / rank) for rank in range(1, 13)],
    ],
    ids=["one", "diverged", "twelve"],
)
def test_pictures_are_drawn(runs, tmp_path):
    pictures = draw(results_of(*runs), tmp_path)
    assert [picture.name for picture in pictures] == ["loss.png", "tradeoff.png"]
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)


@pytest.fixture
def page(tmp_path):
    """The report of some results, and what it says."""

    def write(results):
        picture = tmp_path / "loss.png"
        picture.write_bytes(PNG)
        write_report(results, [picture], tmp_path / "report.html")
        return (tmp_path / "report.html").read_text(encoding="utf-8")

    return write


def test_the_report_needs_nothing_beside_it(page):
    text = page(results_of(run_of(), run_of("onebit", sent=130.0)))
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>)]+)""", text)
    assert [source.partition(",")[0] for source in sources] == ["data:image/png;base64"]
    assert not re.search(r"https?:|<script[^>]+src|<link|@import", text)


def test_the_report_escapes_what_users_named(page):
    name = "<script>alert('&')</script>"
    results = results_of(run_of(name), model={"name": name, "parameters": 1}, config={"out": name})
    text = page(results)
    assert "<script>alert" not in text
    assert unescape(text).count(name) >= 3
