"""One real `gradwire compare`, looked at from all sides."""

import contextlib
import io
import json
import math
import os
import subprocess

import pytest

from gradwire.experiments.cli import main

from .given import LEFT_BEHIND, results_in

COMPRESSORS = ("none", "bf16", "fp16", "powersgd:rank=1", "topk:ratio=0.1", "onebit")
STEPS = 4
WORLD_SIZE = 2
SIZES = {"model": "gpt", "model.width": 32, "model.layers": 1, "model.context": 16, "bucket-mb": 0.05, "data": "text"}
PARAMETERS = 12 * 32**2 + 13 * 32 + 2 * 32 + (2 * 256 + 16) * 32
OPTIONS = {**SIZES, "compressors": ",".join(COMPRESSORS), "steps": STEPS, "threads": 1, "eval-batches": 2}


def flags(**options):
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_bytes(b"".join(f"{index} squared is {index * index}\n".encode() for index in range(1000)))
    return file


@pytest.fixture(scope="module")
def comparison(text, tmp_path_factory):
    """Its folder, what it showed, and its results."""
    shown, folder = io.StringIO(), tmp_path_factory.mktemp("comparison") / "out"
    with contextlib.redirect_stdout(shown):
        assert main(["compare", *flags(**OPTIONS, **{"data.path": text}, nproc=WORLD_SIZE, out=folder)]) == 0
    return folder, shown.getvalue(), results_in(folder)


@pytest.fixture
def runs(comparison):
    return {run["compressor"]: run for run in comparison[2]["runs"]}


def test_it_leaves_results_pictures_and_report(comparison):
    assert {file.name for file in comparison[0].iterdir()} == LEFT_BEHIND


def test_it_shows_a_table_and_a_verdict(comparison):
    shown = comparison[1]
    assert all(spec in shown for spec in COMPRESSORS)
    assert f"gpt ({PARAMETERS:,} parameters) on text, 2 ranks, gloo on cpu" in shown
    assert any(each in shown for each in ("Use ", "Do not compress here: ", "No difference measured."))
    assert str(comparison[0] / "report.html") in shown.replace("\n", "")


def test_results_tell_what_was_run(comparison, text):
    document = comparison[2]
    assert document["world_size"] == WORLD_SIZE
    assert document["backend"] == "gloo"
    assert document["model"] == {"name": "gpt", "parameters": PARAMETERS}
    assert document["data"]["source"] == str(text)
    assert document["config"]["steps"] == STEPS
    assert document["config"]["compressors"] == list(COMPRESSORS)
    assert document["environment"]["launched_by"] == "gradwire"
    assert document["environment"]["device"] == "cpu"


def test_every_run_is_complete(runs):
    for run in runs.values():
        assert run["steps"] == len(run["loss"]) == len(run["train_seconds"]) == STEPS
        assert all(map(math.isfinite, (*run["loss"], run["eval"]["loss"])))
        assert 0 <= run["eval"]["accuracy"] <= 1
        times = run["step_seconds"]
        assert 0 < times["p50"] <= times["p75"] <= times["p90"] <= times["p95"]
        computes = run["compressor"] != "none"
        assert all(value > 0 for name, value in run["seconds"].items() if computes or name == "wait")
        assert run["train_seconds"] == sorted(run["train_seconds"])
        assert run["turn_steps"] == 1
        assert run["peak_memory_bytes"] is None


def test_every_run_starts_from_the_same_model_and_ends_alike_on_all_ranks(runs):
    assert len({run["loss"][0] for run in runs.values()}) == 1
    assert all(len(run["parameters_digest"]) == 64 for run in runs.values())
    assert len({run["parameters_digest"] for run in runs.values()}) == len(runs)


def test_bytes_are_those_of_ring_all_reduces(runs):
    dense = 4 * PARAMETERS
    assert runs["none"]["payload_bytes_per_step"] == dense
    assert runs["none"]["sent_bytes_per_step"] == 2 * (WORLD_SIZE - 1) / WORLD_SIZE * dense
    for spec, run in runs.items():
        assert run["compression_ratio"] == pytest.approx(dense / run["sent_bytes_per_step"]), spec


def test_plan_tells_the_same_bytes(comparison, capsys):
    options = flags(**SIZES, compressors=OPTIONS["compressors"], workers=WORLD_SIZE)
    assert main(["plan", "--json", *options]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["parameters"] == comparison[2]["model"]["parameters"]
    for row, run in zip(planned["rows"], comparison[2]["runs"], strict=True):
        of_memory = {"state_bytes", "work_bytes", "bytes_per_parameter"}
        assert row.keys() > of_memory
        assert all(row[name] == run[name] for name in row.keys() - of_memory)
        assert run["planned_state_bytes"] == pytest.approx(row["state_bytes"], rel=0.05)
        assert run["planned_bytes"] == pytest.approx(row["state_bytes"] + row["work_bytes"], rel=0.05)  # other buckets


@pytest.mark.slow
def test_under_torchrun_it_works_as_it_stands_and_the_same_seed_gives_the_same_run_bit_for_bit(
    comparison, text, tmp_path, forked_python
):
    out = tmp_path / "out"
    words = ["-m", "gradwire", "compare", *flags(**OPTIONS, **{"data.path": text}, out=out)]
    command, variables = forked_python.torchrun("--nproc-per-node", str(WORLD_SIZE), *words)
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in out.iterdir()} == LEFT_BEHIND
    document = results_in(out)
    assert document["environment"]["launched_by"] == "torchrun"
    for again, before in zip(document["runs"], comparison[2]["runs"], strict=True):
        for name in ("compressor", "loss", "eval", "parameters_digest", "sent_bytes_per_step"):
            assert again[name] == before[name]
