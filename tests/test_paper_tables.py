"""Scripts of docs/benchmarks whose tables pages show, and small inputs to what they compute."""

import importlib
import json
import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.testing import SHAPES, bucket, check_conservation, check_telescoping, random_gradients

ROOT = Path(__file__).parents[1]
PAPERS = ROOT / "docs" / "results" / "papers"
LOSS, DELAY, EXACT, FEW = (
    PAPERS.parent / name for name in ("loss", "powersgd-delay", "exact-parameters", "few-bits-muon")
)


@pytest.fixture
def script(monkeypatch):
    """A function from a script's name to its module."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "benchmarks")
    return importlib.import_module


def test_the_table_of_feedback_under_muon_is_that_of_its_file(script):
    page = (LOSS / "README.md").read_text("utf-8").replace("`", "")
    runs = json.loads((LOSS / "muon-feedback.json").read_text())["runs"]
    exact = {run["seed"]: run for run in runs if run["way"] == "none"}
    for way in script("muon_feedback").WAYS:
        own = [run for run in runs if run["way"] == way]
        assert len(own) == 3
        excess = torch.tensor([100 * (run["loss"] / exact[run["seed"]]["loss"] - 1) for run in own])
        fewer = exact[0]["sent_bytes"] / own[0]["sent_bytes"]
        if way.startswith("none"):
            assert excess.abs().max() < 0.02  # so that momentum on the ranks alone changes nothing
        else:
            assert f"| {way} | {fewer:.0f}x | {excess.mean():+.1f} ± {excess.std():.1f} |\n" in page


def demo_lines(demo):
    """The table of demo_bytes.py but for the rows of compressors, which take a minute."""
    demo.COMPRESSORS = ["none"]
    return demo.table().splitlines()


TABLES = {  # script: the page, and the lines that the script makes of the finished runs
    "ef21_bits": (
        PAPERS,
        lambda bits: bits.table(json.loads((PAPERS / "ef21-bits.json").read_text())["rows"]).splitlines(),
    ),
    "muloco_sites": (PAPERS, lambda sites: sites.lines(sites.Known(PAPERS / "muloco-sites.json"), range(2))),
    "powersgd_delay": (DELAY, lambda delay: delay.table(delay.FinishedRuns(DELAY / "runs.json"))),
    "few_bits": (EXACT, lambda few: few.table(EXACT.name, few.FinishedRuns(EXACT / "runs.json"))),
    "update_errors": (FEW, lambda errors: errors.table(errors.FinishedRuns(FEW / "update-errors.json"))),
    "examples_tables": (ROOT / "docs" / "examples.md", lambda examples: map(examples.table, examples.TABLES)),
    "demo_bytes": (PAPERS.parent / "demo-bytes", demo_lines),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_on_a_page_is_that_of_its_file(name, script):
    page, lines = TABLES[name]
    text = (page / "README.md" if page.is_dir() else page).read_text("utf-8")
    assert [line for line in lines(script(name)) if line not in text] == []


def test_exact_averages_turn_no_update_and_a_core_turns_those_of_low_rank_less_than_int4(script):
    errors, names = (
        script("update_errors"),
        ("blocks.layers.0.linear1.weight", "blocks.norm.bias", "tokens.weight", "head.weight"),
    )
    layout = Layout(names, ((64, 64), (64,), (32, 64), (32, 64)), torch.float32, torch.device("cpu"), Ranks(4))
    ways, generator = ("none", "int4:error_feedback=true", "int4, core 4"), torch.Generator().manual_seed(0)
    updates = {way: errors.Updates(errors.WAYS[way], layout) for way in ways}
    compared = {way: errors.Compared() for way in ways}
    for _ in range(4):
        gradients = random_gradients(layout, generator)
        for each in gradients:
            layout.views(each)[names[0]].mul_(0.01)[:2].mul_(1000)
        found = {way: each.step(gradients) for way, each in updates.items()}
        for way in ways:
            compared[way].add(found["none"], found[way], 1.0)
    none, four, core = (compared[way].result() for way in ways)
    assert all(each == {"error": 0, "drift": 0} for each in none.values())
    assert 0 < core["matrices"]["error"] < 0.8 * four["matrices"]["error"]


def test_a_core_and_the_rest_lose_nothing_but_what_is_held_back(script):
    few, layout = script("few_bits"), bucket(SHAPES["layers"], ranks=4)
    check_conservation(few.core(2, few.INT4), layout)
    check_telescoping(few.core(2, few.INT4), layout)


def test_codes_that_no_kernel_has_round_as_those_of_int4(script):
    few, layout, generator = script("few_bits"), bucket(SHAPES["layers"], ranks=4), torch.Generator().manual_seed(0)
    one, other = (Simulation(each, layout) for each in (few.ErrorFeedback(few.in_blocks(4)), compressor("int4")))
    for _ in range(3):
        gradients = random_gradients(layout, generator)
        torch.testing.assert_close(one.step(gradients)[0], other.step(gradients)[0])


def test_muon_in_float32_is_torchs_but_for_the_rounding_of_bfloat16(script):
    few, generator = script("few_bits"), torch.Generator().manual_seed(0)
    task = few.LONGER["gpt-muon-400"]
    models = [nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))})]
    models.append(deepcopy(models[0]))
    before = [each.detach().clone() for each in models[0].parameters()]
    optimizers = [few.Trial(**vars(task)).optimizers(models[0])[0], task.optimizers(models[1])[0]]
    for _ in range(3):
        for own, other in zip(*(model.parameters() for model in models), strict=True):
            own.grad = other.grad = torch.randn(own.shape, generator=generator)
        for each in optimizers:
            each.step()
    for own, other, first in zip(*(model.parameters() for model in models), before, strict=True):
        assert (own - other).norm() <= 0.02 * (own - first).norm()


def test_a_training_at_half_the_pace_is_half_of_its_steps_behind(script):
    """Validations come every 25 steps; before the other's first one, and below its last, nothing is known."""
    fast, slow = ([10 - pace * step for step in range(25, 125, 25)] for pace in (0.02, 0.01))
    assert script("powersgd_delay").behind(slow, fast)[2:] == pytest.approx([37.5, 50])
    assert all(map(math.isnan, script("powersgd_delay").behind([9.9, 1.0], fast)))


def test_a_finished_run_is_not_repeated(script, tmp_path):
    file, runs = tmp_path / "new" / "runs.json", [{"seed": seed} for seed in range(3)]
    first = script("finished_runs").FinishedRuns(file)
    for run in first.missing(runs[:2]):
        first.add(run, loss=float(run["seed"]))
    again = script("finished_runs").FinishedRuns(file)
    assert list(again.missing(runs)) == runs[2:]
    assert again.find({"seed": 1}) == {"seed": 1, "loss": 1.0}
