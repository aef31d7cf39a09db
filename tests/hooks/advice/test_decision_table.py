"""The decision table: every figure is that of its source, and every page, `advise` and `compare` take it from there."""

import importlib
import json
import re
from pathlib import Path
from statistics import mean, median

import pytest
import yaml

from gradwire.compress import compressor
from gradwire.experiments.compare.config import CompareConfig
from gradwire.hooks.advice import Rule
from gradwire.hooks.advice.candidates import candidates
from gradwire.hooks.advice.decision_table import (
    ADAMW,
    ANSWERS,
    AS_ADAMW,
    CANDIDATES,
    LARGER,
    MEASURED,
    MUON,
    NETWORKS,
    OPTIMIZERS,
    PREDICTED,
    SEED,
    SGD,
    uncertainty,
)
from gradwire.hooks.advice.recommendation import TIE

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
CELLS = [pytest.param(each, id=f"{each.network}, {each.optimizer}") for each in ANSWERS]
PER_CENT = 5  # above none: compressors worse than that are of no use to anybody
TASKS = {ADAMW: ["gpt-adamw"], SGD: ["resnet-sgd", "lstm-sgd"], MUON: ["gpt-muon"]}  # tasks of losses.json


@pytest.fixture
def script(monkeypatch):
    """docs/benchmarks/decision_table.py as a module."""
    monkeypatch.syspath_prepend(DOCS / "benchmarks")
    return importlib.import_module("decision_table")


def rows(page):
    """The rows of a study's table: {column: cell}."""
    lines = [line for line in (DOCS / "results" / page).read_text("utf-8").splitlines() if line.startswith("| ")]
    titles = [cell.strip() for cell in lines[0].split("|")]
    return [dict(zip(titles, (cell.strip() for cell in line.split("|")), strict=True)) for line in lines[2:]]


def of_study(page, column, **wanted):
    """A figure of the only row with such cells."""
    (row,) = [each for each in rows(page) if all(each[name] == value for name, value in wanted.items())]
    return float(row[column])


def measured_losses(file="losses.json"):
    """{(task, compressor): the mean over seeds of the loss above that of none} of a file."""
    runs = json.loads((DOCS / "results" / "loss" / file).read_text("utf-8"))["runs"]
    losses = {(run["task"], run["compressor"], run["seed"]): run["loss"] for run in runs}
    ratios = {}
    for (task, spec, seed), loss in losses.items():
        ratios.setdefault((task, spec), []).append(loss / losses[task, "none", seed] - 1)
    return {key: mean(values) for key, values in ratios.items()}


def loss_on_a_gpu(spec, optimizer):
    """The mean over seeds of the loss above that of none, of a GPT of 11 M parameters."""
    lines = (DOCS / "benchmarks" / "h200" / "quality-small.jsonl").read_text("utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if run["optimizer"] == optimizer and "loss" in run]
    losses = {(run["compressor"], run["seed"]): run["loss"] for run in runs}
    return mean(loss / losses["none", seed] - 1 for (each, seed), loss in losses.items() if each == spec)


def sources_loss(spec, optimizer):
    """The loss by its source: of the largest model if it has one, else of losses.json, the worst of its tasks."""
    if optimizer == ADAMW and spec in ("int4", "powersgd:rank=8,payload=int8"):
        rate = {"netlab.rate": "1gbit" if spec == "int4" else "100mbit", "compressor": spec}
        return of_study("time-to-accuracy-gpt/README.md", "excess_loss", **rate) / 100
    if optimizer == MUON and spec == "int4":
        return loss_on_a_gpu("int4:start_iter=100", "muon")
    if optimizer == MUON and spec == "powersgd:rank=8,payload=int8":
        return measured_losses("warm-up.json")["gpt-muon-400", spec]
    losses = measured_losses()
    return max(losses[task, spec] for task in TASKS[optimizer])


def test_every_cell_has_one_answer():
    assert [(each.network, each.optimizer) for each in ANSWERS] == [(a, b) for a in NETWORKS for b in OPTIMIZERS]
    assert {each.kind for each in ANSWERS} == {MEASURED, PREDICTED}


def test_every_answer_is_a_candidate_of_advise_and_compared_by_default():
    answers = {each.compressor for each in ANSWERS}
    assert answers <= {each.spec for each in candidates(None)}
    assert answers <= set(CompareConfig().compressors)
    assert answers <= set(yaml.safe_load((ROOT / "experiments/configs/compare.yaml").read_text("utf-8"))["compressors"])


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda each: each.spec)
def test_a_candidate_is_a_compressor_and_its_losses_are_of_the_tables_optimizers(candidate):
    assert compressor(candidate.spec)
    assert candidate.losses.keys() <= set(OPTIMIZERS)


@pytest.mark.parametrize("candidate", CANDIDATES[1:], ids=lambda each: each.spec)
def test_an_expected_loss_is_that_of_its_source(candidate):
    expected = {name: sources_loss(candidate.spec, name) for name in candidate.losses}
    assert candidate.losses == pytest.approx(expected, abs=5.1e-4)


@pytest.mark.parametrize("answer", [each for each in CELLS if each.values[0].kind == MEASURED])
def test_a_measured_speed_up_is_that_of_its_study(answer):
    if answer.local_loss is None:
        row = {"netlab.rate": {NETWORKS[0]: "100mbit", NETWORKS[1]: "1gbit"}[answer.network]}
        row["compressor"] = answer.compressor
        assert answer.speed_up == round(of_study("time-to-accuracy-gpt/README.md", "speedup", **row), 1)
    else:
        row = {"netlab.rate": "10mbit", "compressor": "int4", "local_every": "32", "runs": "3"}
        assert answer.speed_up == round(of_study("local-steps/README.md", "speedup", **row))
        assert answer.local_loss * 100 == pytest.approx(
            of_study("local-steps/README.md", "excess_loss", **row), abs=0.05
        )


@pytest.mark.parametrize("answer", [each for each in CELLS if each.values[0].kind == PREDICTED])
def test_a_predicted_speed_up_is_computed_from_its_source(answer, script):
    if answer.source == AS_ADAMW:
        (adamw,) = [each for each in ANSWERS if (each.network, each.optimizer) == (answer.network, ADAMW)]
        expected, compressors = adamw.speed_up, adamw.compressor
        assert (answer.compressor, answer.local_loss) == (compressors, adamw.local_loss)
    elif answer.source == "GPT 19 M":  # with Muon int4 has error feedback
        row = {"netlab.rate": "100mbit", "compressor": f"{answer.compressor}:error_feedback=true"}
        expected = of_study("time-to-accuracy-gpt/README.md", "step_speedup", **row)
    elif answer.source == "ResNet-18":
        expected = script.measured_steps(answer)
    else:
        expected = script.predicted(answer, answer.compressor)
    assert answer.speed_up == round(expected, 1 if expected < 10 else None)


@pytest.mark.parametrize("answer", [each for each in CELLS if each.values[0].network in NETWORKS[2:4]])
def test_a_calculated_answer_is_that_of_the_rule_of_advise(answer, script):
    rule, losses = Rule(), {each.spec: each.losses[answer.optimizer] for each in CANDIDATES}
    gains = {spec: script.predicted(answer, spec) for spec, loss in losses.items() if loss <= rule.tolerance}
    near = [spec for spec in gains if gains[spec] * (1 + TIE) >= max(gains.values())]
    best = min(near, key=lambda spec: round(max(losses[spec], 0.0), 2))
    if gains[best] < rule.worthwhile:
        assert answer.compressor == "bf16"
    else:
        assert gains[answer.compressor] == gains[best]
        assert round(losses[answer.compressor], 2) <= round(losses[best], 2)


def test_the_tables_of_the_pages_are_those_of_the_file(script):
    for page, table in (("README.md", script.readme_table()), ("docs/choosing.md", script.whole_table())):
        text = (ROOT / page).read_text("utf-8")
        assert f"\n\n{table}\n\n" in text, f"python docs/benchmarks/decision_table.py prints the table of {page}"


def test_every_source_is_explained_on_the_page():
    page = (DOCS / "choosing.md").read_text("utf-8")
    assert [each for each in {answer.source for answer in ANSWERS} if f"| {each} |" not in page] == []


def test_the_page_about_a_box_without_nvlink_has_the_same_answers(script):
    page = " ".join((DOCS / "gpus-without-nvlink.md").read_text("utf-8").split())
    spec, loss = {}, {}
    for answer in (each for each in ANSWERS if each.network == NETWORKS[4]):
        spec[answer.optimizer], _, loss[answer.optimizer] = script.figures(answer)
    assert spec[ADAMW] == spec[MUON]
    assert f"Use {spec[ADAMW]} with AdamW ({loss[ADAMW]} validation loss) and with Muon ({loss[MUON]})." in page
    assert f"With SGD and a convolutional network, {spec[SGD]} is enough" in page


def test_the_example_of_advise_has_the_losses_of_the_file():
    page = (DOCS / "advise.md").read_text("utf-8")
    shown = re.findall(r"^(\S+) +(?:priority|backward) .* ([+-]\d+\.\d%)$", page, re.MULTILINE)
    losses = {each.spec: f"{each.losses[SGD]:+.1%}" for each in CANDIDATES}
    assert shown
    assert all(losses[spec] == loss for spec, loss in shown)


def gpt(study):
    """{compressor: its row} of the GPT on four ranks; warm-ups under one name."""
    rows = json.loads((DOCS / "results" / study / "study.json").read_text())["rows"]
    return {
        row["compressor"].replace("=60", "=20"): row for row in rows if (row["model"], row["world_size"]) == ("gpt", 4)
    }


def test_the_figures_of_uncertainty_are_those_of_the_studies():
    short, long = gpt("quality"), gpt("quality-long")
    spreads = [row.get("excess_loss.spread") for row in short.values() if row["excess_loss"] < PER_CENT]
    assert round(median(filter(None, spreads)), 1) == SEED
    changes = [long[name]["excess_loss"] - short[name]["excess_loss"] for name in long.keys() & short.keys()]
    assert len(changes) > 5
    assert round(max(map(abs, changes)), 1) == LARGER
    assert f"{SEED} points" in uncertainty()
    assert f"{LARGER} points" in uncertainty()
