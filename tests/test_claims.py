"""Every figure of the users' pages is a claim: computed from raw points, printed as computed, and told with its source."""

import csv
import importlib
import sys
from math import sqrt
from statistics import mean, median

import pytest
import yaml

from gradwire.compress import compressor
from gradwire.experiments.advice.candidates import (
    ANSWERED,
    CANDIDATES,
    LARGER,
    LONGER,
    MOST_SEED,
    SEED,
    candidates,
    uncertainty,
)
from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.plan import HIDDEN
from gradwire.experiments.results.statistics import STUDENT
from gradwire.experiments.sites_lines import LOSS

from .test_docs import ROOT

SCRIPTS = ROOT / "docs" / "benchmarks"
NAMES = ["README.md", *(f"docs/{name}.md" for name in (
    "choosing", "muon", "should-i-compress", "promises", "fsdp", "gpus-without-nvlink", "alternatives", "local-steps",
    "local-steps-explained",
))]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def scripts():
    """docs/benchmarks among the folders of modules."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def claims(scripts):
    return importlib.import_module("claims.pages").all_claims()


@pytest.fixture(scope="module")
def pages(claims):
    return importlib.import_module("claims.pages").all_pages(claims)


@pytest.fixture(scope="module")
def render(scripts):
    return importlib.import_module("claims.render")


def test_every_page_with_claims_is_compared(pages):
    assert set(NAMES) == set(pages)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_claims_as_computed_and_no_other_figure(name, pages, claims, render):
    found = list(render.problems((ROOT / name).read_text("utf-8"), pages[name], claims))
    assert found == [], "python docs/benchmarks/write_claims.py writes the figures"


def test_the_table_of_claims_is_that_of_today(claims):
    script = importlib.import_module("write_claims")
    written = list(csv.reader(script.TABLE.read_text("utf-8").splitlines()))
    today = [list(row) for row in (script.HEAD, *map(script.row_of, claims.values()))]
    for row in (*written, *today):
        del row[script.HEAD.index("commit")]  # which may be made anew, and a copy of the tree has none
    assert written == today


def test_every_finished_run_is_in_a_table_that_its_page_links():
    runs = importlib.import_module("claims.runs")
    script = importlib.import_module("write_claims")
    for folder in runs.FOLDERS:
        written = (ROOT / folder / "runs.csv").read_text("utf-8")
        assert written == script.as_csv(runs.rows(folder))
        assert written.count("\n") == 1 + sum(len(runs.finished(file)) for file in runs.files(folder))
        of_results = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "results").glob("*.md"))
        linked = f"({folder.removeprefix('docs/results/')}/runs.csv)" in of_results
        assert linked or "(runs.csv)" in (ROOT / folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize("points", sorted(ROOT.glob("docs/results/*/points.jsonl")), ids=lambda file: file.parent.name)
def test_every_finished_row_of_a_study_is_in_its_table(points):
    raw = importlib.import_module("claims.claim").raw
    rows = [row for point in raw(points.relative_to(ROOT).as_posix()) for row in point["rows"]]
    shown = importlib.import_module("claims.claim").study_rows(points.parent.name)
    elsewhere = points.parent.relative_to(ROOT).as_posix() in importlib.import_module("claims.runs").FOLDERS
    earlier = points.with_name("earlier.csv")  # runs of an earlier configuration
    old = csv.DictReader(earlier.read_text("utf-8").splitlines()) if earlier.exists() else ()
    before = sum(int(row.get("runs") or row.get("seeds") or 1) for row in old)
    assert elsewhere or sum(row.get("runs", 1) for row in shown) + before >= len(rows)


def test_expected_losses_of_advise_are_those_of_the_claims(claims):
    for candidate in CANDIDATES[1:]:
        for optimizer in candidate.losses:
            name = f"loss {candidate.spec} {optimizer}"
            worst = max(mean(each.values) for each in claims.values() if f"{each.name}, ".startswith(f"{name}, "))
            assert candidate.losses[optimizer] == pytest.approx(worst / 100, abs=5.1e-4)


def test_a_loss_is_expected_up_to_the_largest_model_of_the_claims(claims):
    for candidate in CANDIDATES[1:]:
        assert candidate.largest.keys() == candidate.losses.keys()
        for optimizer, largest in candidate.largest.items():
            name = f"loss {candidate.spec} {optimizer}"
            found = [each.source.model for each in claims.values() if f"{each.name}, ".startswith(f"{name}, ")]
            size = max(float(model.split(" M")[0]) for model in found)
            assert round(largest / 1e6, 1 if size < 10 else None) == size
            assert candidate.expected_loss(optimizer, int(largest)) == candidate.losses[optimizer]
            beyond = candidate.expected_loss(optimizer, int(largest) + 1)
            assert (beyond is not None) == (candidate.spec in ("bf16", "int8", "int4"))
    assert claims["rank 32 400"].text == "+27.3 %"


def test_plan_tells_what_local_sgd_costs_and_what_its_predictions_are_worth(claims):
    assert f"was {claims['gain of predicted'].text} of the predicted one" in HIDDEN["ddp"]
    assert f"ended {claims['sites int4'].text.split()[0].lstrip('+')} % above" in LOSS


def test_the_named_compressors_are_candidates_of_advise_and_compared_by_default():
    assert set(ANSWERED) <= {each.spec for each in candidates(None)}
    assert set(ANSWERED) <= set(CompareConfig().compressors)
    shipped = yaml.safe_load((ROOT / "experiments/configs/compare.yaml").read_text("utf-8"))
    assert set(ANSWERED) <= set(shipped["compressors"])
    assert all(compressor(each.spec) for each in CANDIDATES)


def gpt(study):
    """{compressor: its row} of the GPT on four ranks; warm-ups under one name."""
    rows = importlib.import_module("claims.claim").study_rows(study)
    here = [row for row in rows if (row["model"], row.get("world_size", 4)) == ("gpt", 4)]
    return {row["compressor"].replace("=60", "=20"): row for row in here}


def over_none(task, file):
    """The mean over seeds of PowerSGD's distance to none with Muon."""
    losses = importlib.import_module("claims.losses")
    return mean(losses.of_table(file, task).excess("powersgd:rank=8,payload=int8"))


def test_the_figures_of_uncertainty_are_those_of_the_studies():
    short, long = gpt("quality"), gpt("quality-long")
    widths = [(row.get("excess_loss.interval"), int(row["runs"])) for row in short.values()]
    spreads = [width * sqrt(runs) / STUDENT[runs - 2] for width, runs in widths if width]
    assert round(median(spreads), 1) == SEED
    assert round(max(spreads), 1) == MOST_SEED
    both = long.keys() & short.keys()
    assert all("start_iter=20" in name or name == "none" for name in both)
    changes = [long[name]["excess_loss"] - short[name]["excess_loss"] for name in both]
    assert len(changes) > 5
    assert round(max(map(abs, changes)), 1) == LARGER
    losses = importlib.import_module("claims.losses")
    change = over_none("gpt-muon-400", losses.WARM_UP) - over_none("gpt-muon", losses.TABLE)
    assert round(change, 1) == LONGER
    for figure in (f"{SEED} points", f"most {MOST_SEED})", f"{LARGER} points", f"by {LONGER}."):
        assert figure in uncertainty()


@pytest.mark.parametrize("words", ["their standard deviation", "its standard deviation", "are the standard deviation"])
def test_no_page_of_results_has_standard_deviations_beside_intervals(words):
    pages = [*ROOT.glob("docs/results/**/*.md"), *ROOT.glob("docs/benchmarks/**/*.md")]
    assert [page for page in pages if words in page.read_text("utf-8")] == []


@pytest.mark.parametrize("words", ["less than 1 %", "below 1 %", "--seeds 3 can"])
def test_no_page_says_that_a_seed_or_three_decide_one_per_cent(words):
    patterns = ("*.md", "docs/**/*.md", "experiments/**/*.py", "hooks/**/*.py")
    told = [file for pattern in patterns for file in ROOT.glob(pattern)]
    assert [file for file in told if words in file.read_text("utf-8")] == []
