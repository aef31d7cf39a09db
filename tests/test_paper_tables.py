"""Scripts of docs/benchmarks whose tables pages show, and small inputs to what they compute."""

import csv
import importlib
import json
import re
import statistics
from copy import deepcopy
from itertools import starmap
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.compress import Layout, Ranks, Simulation, compressor
from gradwire.experiments.results.statistics import interval
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.training import initial_model, loss_of
from gradwire.testing import SHAPES, bucket, check_conservation, check_telescoping, random_gradients

ROOT = Path(__file__).parents[1]
PAPERS, BENCHMARKS = ROOT / "docs" / "results" / "papers", ROOT / "docs" / "benchmarks"
pytestmark = pytest.mark.slow
FOLDERS = ("loss", "powersgd-delay", "exact-parameters", "few-bits-muon", "hundredfold")
LOSS, DELAY, EXACT, FEW, HUNDREDFOLD = (PAPERS.parent / name for name in FOLDERS)
UNLIKE = LOSS / "unlike-gradients.md"


@pytest.fixture
def script(monkeypatch):
    """A function from a script's name to its module."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "benchmarks")
    return importlib.import_module


def test_the_table_of_feedback_under_muon_is_that_of_its_file(script):
    page = (LOSS / "muon.md").read_text("utf-8").replace("`", "")
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
            name = f"{way} (one setting, not tuned)" if way.startswith("Dion") else way
            assert f"| {name} | {fewer:.0f}x | {excess.mean():+.1f} ± {interval(excess.tolist()):.1f} |\n" in page


def demo_lines(demo):
    """The table of demo_bytes.py but for the rows of compressors, which take a minute."""
    demo.COMPRESSORS = ["none"]
    return demo.table().splitlines()


def rows_of(name, but=None):
    """The rows of a file of one training each, but for one."""
    rows = json.loads((LOSS / f"{name}.json").read_text())["rows"]
    return {key: row for key, row in rows.items() if key != but}


TABLES = {  # script: the page, and the lines that the script makes of the finished runs
    "ef21_bits": (
        PAPERS / "ef21.md",
        lambda bits: bits.table(json.loads((PAPERS / "ef21-bits.json").read_text())["rows"]).splitlines(),
    ),
    "muloco_sites": (
        PAPERS / "muloco.md",
        lambda sites: sites.lines(sites.Known(PAPERS / "muloco-sites.json"), range(2)),
    ),
    "powersgd_delay": (DELAY, lambda delay: delay.table(delay.FinishedRuns(DELAY / "runs.json"))),
    "few_bits": (EXACT, lambda few: few.table(EXACT.name, few.FinishedRuns(EXACT / "runs.json"))),
    "update_errors": (FEW, lambda errors: errors.table(errors.FinishedRuns(FEW / "update-errors.json"))),
    "examples_tables": (ROOT / "docs" / "examples.md", lambda examples: map(examples.table, examples.TABLES)),
    "hundredfold": (HUNDREDFOLD / "ways.csv", lambda local: local.table(local.FinishedRuns(HUNDREDFOLD / "runs.json"))),
    "demo_bytes": (PAPERS.parent / "demo-bytes", demo_lines),
    "small_parameters": (UNLIKE, lambda small: starmap(small.line, rows_of("small-parameters").items())),
    "unequal_inputs": (UNLIKE, lambda unequal: starmap(unequal.line, rows_of("unequal-inputs", but="1").items())),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table_on_a_page_is_that_of_its_file(name, script):
    page, lines = TABLES[name]
    text = (page / "README.md" if page.is_dir() else page).read_text("utf-8")
    assert [line for line in lines(script(name)) if line not in text] == []


def test_the_tables_of_fsdp2_have_the_intervals_of_their_files(script):
    page, weights = BENCHMARKS / "README.md", json.loads((BENCHMARKS / "fsdp2-losses-weights.json").read_text())
    losses, shown = script("fsdp2_losses").Losses(None, {}), page.read_text("utf-8").replace(", two ranks per host", "")
    for losses.read in (
        {spec: dict(zip("012", found, strict=True)) for spec, found in weights["losses"].items()},
        json.loads((BENCHMARKS / "fsdp2-losses.json").read_text())["losses"],
    ):
        rows = [losses.row(spec, "none/none", range(3)) for spec in losses.read if spec != "none/none"]
        assert sum(f"{row}\n" in shown for row in rows) >= 4
        figures = [row.split("|")[2] for row in rows if f"{row}\n" not in shown]
        assert not [each for each in figures if each in shown]


def test_the_table_of_losses_on_a_gpu_has_the_intervals_of_its_file():
    lines = (BENCHMARKS / "h200" / "quality-small.jsonl").read_text().splitlines()
    runs = [run for run in map(json.loads, lines) if (run["optimizer"], run["steps"]) == ("adamw", 2000)]
    page = (BENCHMARKS / "h200" / "README.md").read_text("utf-8")
    for spec in {run["compressor"] for run in runs} - {"none"}:
        cells = []
        for loss in (lambda run: run["losses"]["700"], lambda run: run["loss"]):
            of = {(run["compressor"], run["seed"]): loss(run) for run in runs}
            above = [100 * (of[spec, seed] / of["none", seed] - 1) for seed in range(3) if (spec, seed) in of]
            cells.append(f"{statistics.fmean(above):+.1f} ± {interval(above):.1f}".replace("+0.0 ", "0.0 "))
        shown = " | ".join(cells).replace("-0.0 ", "0.0 ")
        assert len(above) < 3 or f"| `{spec.replace(',start_iter=100', '')}` | {shown} |" in page, spec


COLUMNS = {"GPT, AdamW": "gpt-adamw", "GPT, Muon": "gpt-muon", "ResNet, SGD": "resnet-sgd", "LSTM, SGD": "lstm-sgd"}
STUDY = {"GPT, AdamW": "gpt", "ResNet, SGD": "resnet18-cifar", "LSTM, SGD": "lstm"}
LOSSES = {  # a section: its file or study, and the task of each column
    "Three models, with and without a warm-up": ("quality", STUDY),
    "The line to paste, without a warm-up": ("losses", COLUMNS),
    "Error feedback on and off": ("feedback", COLUMNS),
    "A warm-up with Muon": ("warm-up", {"loss above `none`, %": "gpt-muon-400"}),
    "A warm-up with AdamW": ("warm-up", {"loss above `none`, %": "gpt-adamw-400"}),
}


def section_of(heading):
    """The text below a heading of the pages of losses, up to the next one."""
    texts = [page.read_text("utf-8") for page in LOSS.glob("*.md")]
    (found,) = (text.split(f"## {heading}\n")[1] for text in texts if f"## {heading}\n" in text)
    return found.split("\n## ")[0]


def kept_losses(name):
    """Return {(task, compressor, seed): validation loss} of a file of losses, or of a study on four ranks."""
    file, points = LOSS / f"{name}.json", LOSS.parent / name / "points.jsonl"
    if file.exists():
        runs = json.loads(file.read_text())["runs"]
        return {(run["task"], run["compressor"], run["seed"]): run["loss"] for run in runs}
    rows = [row for point in points.read_text().splitlines() for row in json.loads(point)["rows"]]
    return {(row["model"], row["compressor"], row["seed"]): row["eval.loss"] for row in rows if row["world_size"] == 4}


@pytest.mark.parametrize(("section", "study"), [(key, file) for key, (file, _) in LOSSES.items() if "quality" in file])
def test_bytes_of_a_table_are_those_of_a_compressed_step_and_of_all_steps(section, study, script):
    points = (LOSS.parent / study / "points.jsonl").read_text().splitlines()
    rows = [row for point in points for row in json.loads(point)["rows"] if row["world_size"] == 4]
    exact = {row["model"]: row["total_sent_bytes"] for row in rows if row["compressor"] == "none"}
    text = section_of(section)
    assert "| compressor | fewer bytes per compressed step (in all) |" in text
    times = script("claims.claim").times
    for name, cell in re.findall(r"^\| `(\S+)` \| ([^|]+) \|", text, re.MULTILINE):
        own = [row for row in rows if row["compressor"] == name]
        late = times([row["compression_ratio"] for row in own])
        whole = times([exact[row["model"]] / row["total_sent_bytes"] for row in own])
        assert cell == (late if late == whole else f"{late} ({whole})"), name


def test_the_table_of_low_rank_is_that_of_its_file(script):
    rows = csv.reader((LOSS / "low-rank.csv").read_text("utf-8").splitlines())
    assert list(rows) == list(script("low_rank_choices").table(LOSS / "low-rank.json"))


@pytest.mark.parametrize("section", LOSSES)
def test_losses_of_a_table_are_those_of_its_file(section):
    file, tasks = LOSSES[section]
    kept = kept_losses(file)
    lines = [line.strip("| ").split(" | ") for line in section_of(section).splitlines() if line.startswith("| ")]
    head, *rows = lines
    checked = 0
    for name, *cells in rows:
        for column, cell in zip(head[1:], cells, strict=True):
            seeds = [key[2] for key in kept if key[:2] == (tasks.get(column), name.strip("`"))]
            if not seeds:
                assert column not in tasks or cell == "not run"
                continue
            own = [100 * (kept[tasks[column], name.strip("`"), n] / kept[tasks[column], "none", n] - 1) for n in seeds]
            mean, *spread = map(float, re.findall(r"[+-]?\d+\.\d+", cell))
            assert mean == pytest.approx(statistics.fmean(own), abs=0.051), (name, column)
            if len(own) > 1:
                assert spread == [pytest.approx(interval(own), abs=0.051)], (name, column)
            checked += 1
    assert checked >= len(rows)


@pytest.fixture(scope="module")
def text():
    """Text for a GPT, as the scripts read it."""
    return load_dataset(DataConfig(), ModelConfig("gpt", context=64))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sites_that_average_at_every_step_train_as_one_model_on_all_their_sequences(script, text, optimizer):
    hundredfold, few, steps = script("hundredfold"), script("few_bits"), 3
    task = few.Trial(script("compressor_loss").GPT, optimizer, 0.004, 0, steps, batch_size=4)
    model = initial_model(task.config(0), text, torch.device("cpu"))
    sites, optimizers = hundredfold.Sites(model, hundredfold.Way(optimizer=optimizer)), task.optimizers(model)
    batches = hundredfold.stacked([text.train_batches(4, seed=0, rank=rank, world_size=4) for rank in range(4)])
    for _ in range(steps):
        inputs, targets = next(batches)
        found = sites.gradients(inputs, targets)
        sites.step(found.mean(0).expand(4, -1).clone(), 1.0)
        loss_of(model, inputs.flatten(0, 1), targets.flatten(0, 1)).backward()
        for name, gradient in sites.named(found).items():
            torch.testing.assert_close(gradient.mean(0), model.get_parameter(name).grad, atol=1e-6, rtol=1e-4)
        for each in optimizers:
            each.step()
            each.zero_grad()
    for name, values in sites.named(sites.models.detach()).items():
        torch.testing.assert_close(values[3], model.get_parameter(name).detach(), atol=1e-3, rtol=1e-3)


def test_local_sgd_sends_what_its_rounds_do(script, text, monkeypatch):
    """Steps 1 and 2 of 8 average gradients in 8 bits; models are averaged after steps 5 and 8, and a moment once."""
    hundredfold = script("hundredfold")
    monkeypatch.setattr(hundredfold, "VALIDATION", (4, 1))
    way = hundredfold.Way(start=0.25, first="int8", every=3, moments="none", rounds=(2, 3))
    once = 2 * 3 / 4 * 4 * 136_960  # bytes that a site sends to average uncompressed gradients once
    found = hundredfold.trained(way, 0, text, steps=8)
    assert found["sent_bytes"] == pytest.approx(once * (2 / 3.835 + 2 + 1), rel=1e-3)


def test_a_round_has_all_sites_at_their_mean_and_no_second_moment_below_zero(script):
    hundredfold, generator = script("hundredfold"), torch.Generator().manual_seed(0)
    layout = Layout(("weight",), ((64, 64),), torch.float32, torch.device("cpu"), Ranks(4))
    rows = torch.randn(4, 4096, generator=generator)
    mean = rows.mean(0)
    hundredfold.Common(rows, hundredfold.averages_of("none", layout), "average").average()
    torch.testing.assert_close(rows, mean.expand(4, -1), atol=1e-6, rtol=1e-6)
    squares = torch.randn(4, 4096, generator=generator) ** 8
    before = squares.clone()
    hundredfold.Common(squares, hundredfold.averages_of("int2", layout), "average").average(0.1 * squares)
    assert (squares >= 0.1 * before).all()


@pytest.mark.parametrize("over", ["senders", "sites"])
def test_sparseloco_keeps_what_it_does_not_send_and_sends_few_elements_of_four_values(script, over):
    layout = Layout(("weight", "bias"), ((128, 64), (64,)), torch.float32, torch.device("cpu"), Ranks(4))
    sparse = script("sparseloco").SparseLoCo(layout, 1 / 64, over)
    generator, held = torch.Generator().manual_seed(0), torch.zeros(4, layout.numel)
    for _ in range(3):
        differences = torch.randn(4, layout.numel, generator=generator)
        mean = sparse.step([*differences])[0]
        sent = 0.95 * held + differences - sparse.residuals
        sent = torch.where(sent.abs() < 1e-5, 0.0, sent)
        held = sparse.residuals.clone()
        for row in sent:
            weight = layout.views(row)["weight"]
            assert [int((half != 0).sum()) for half in weight.split(64)] == [64, 64]
            assert len(weight[weight != 0].mul(1e4).round().unique()) <= 4
        number = (sent != 0).sum(0).clamp(min=1) if over == "senders" else 4
        torch.testing.assert_close(mean, sent.sum(0) / number, atol=1e-5, rtol=1e-4)
    assert sparse.traffic.sent_bytes == 3 * ((2 * 64 + 1) * 14 + 2 * 5 * 32) / 8


def test_exact_averages_turn_no_update_and_a_core_turns_those_of_low_rank_less_than_int4(script):
    errors = script("update_errors")
    names = ("blocks.layers.0.linear1.weight", "blocks.norm.bias", "tokens.weight", "head.weight")
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


def test_losses_and_bytes_of_loops_are_those_of_their_file():
    page = (PAPERS.parent / "loops" / "README.md").read_text("utf-8")
    names = {"flat": "flat all-reduce", "FSDP1": "FSDP1", "Muon": "Muon"}
    loops = json.loads((PAPERS.parent / "loops" / "losses.json").read_text())["loops"]
    assert loops.keys() == names.keys()
    for loop, found in loops.items():
        changes = [100 * (ours / exact - 1) for exact, ours in zip(*found["losses"].values(), strict=True)]
        loss = f"no difference seen ({statistics.fmean(changes):+.2f} ± {interval(changes):.2f} %)"
        assert f"| {names[loop]} | {loss} | {found['sent_bytes_per_step']:,.0f} |" in page
        assert f"{found['on_loopback_per_step']:,.0f}" in page


def test_the_best_measured_step_is_the_fastest_of_what_loses_little_unless_uncompressed_ones_are_near(script):
    best = script("advise_check").best_measured
    lossy = "topk:ratio=0.01,error_feedback=0.9"
    measured = {("none", "backward"): 10.0, ("hosts+int4", "priority"): 2.0, (lossy, "backward"): 1.0}
    assert best({key: (0.0, seconds) for key, seconds in measured.items()}) == ("hosts+int4", "priority")
    assert best({key: (0.0, 2.0) for key in measured if key[0] != lossy}) == ("none", "backward")
