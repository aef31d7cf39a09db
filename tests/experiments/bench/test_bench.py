import contextlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch

from gradwire.experiments.bench import command
from gradwire.experiments.bench.command import rank_main
from gradwire.experiments.bench.config import BenchConfig
from gradwire.experiments.bench.models import task
from gradwire.experiments.bench.rows import Case, bounds
from gradwire.experiments.bench.run import world_sizes
from gradwire.experiments.bench.world import World
from gradwire.experiments.cli import main

QUICK = ("--batch-size", "2", "--steps", "2", "--warmup", "1", "--threads", "1", "--timeout", "60")


def shown_rank(rank, rendezvous, config, backend):
    """A rank of `bench` whose words go to a file beside its results."""
    os.environ["COLUMNS"] = "80"
    with Path(config.json).with_suffix(f".{rank}").open("w") as file, contextlib.redirect_stdout(file):
        rank_main(rank, rendezvous, config, backend)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, quick_start):
    """What two ranks showed and wrote."""
    path = tmp_path_factory.mktemp("bench") / "a.json"
    factors = ("--ddp", "torch,gradwire", "--compressors", "none,batched-powersgd:rank=1", "--overlap", "true,false")
    arguments = ["bench", *QUICK, "--nproc", "2", "--models", "mlp", *factors, "--json", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "rank_main", shown_rank)
        patch.setattr(sys, "argv", ["gradwire", *arguments])
        assert main(arguments) == 0
    assert path.with_suffix(".1").read_text() == ""
    return path.with_suffix(".0").read_text(), json.loads(path.read_text())


@pytest.mark.slow
def test_the_file_has_all_that_was_measured(measured):
    document = measured[1]
    assert document["kind"] == "bench"
    assert document["torch"] == torch.__version__
    assert document["environment"]["backend"] == "gloo"
    assert document["environment"]["device"] == "cpu"
    assert document["config"]["batch_size"] == 2
    assert document["command"].startswith("gradwire bench --batch-size 2")
    rows = {(row["world_size"], row["ddp"], row["compressor"], row["overlap"]): row for row in document["rows"]}
    for (ranks, ddp, _, _), row in rows.items():
        seconds, rates = row["measurements"]["sec_per_iter"], row["measurements"]["ex_per_sec"]
        assert list(seconds) == list(rates) == ["p50", "p75", "p90", "p95"]
        assert all(rates[name] == pytest.approx(2 / seconds[name]) for name in seconds)
        assert len(row["seconds"]) == 2 * ranks
        assert set(row["phases"]) == {"forward", "backward", "exposed", "optimizer"}
        assert 0 < sum(row["phases"].values()) < 1.5 * max(row["seconds"])
        assert row["machines"] == 1
        assert (row["sent_bytes_per_step"] > 0) == (ranks == 2 and ddp != "none")
    dense = 4 * sum(parameter.numel() for parameter in task("mlp", 0).build().parameters())
    low_rank, tuned = "batched-powersgd:rank=1", "batched-powersgd:rank=1,error_feedback=0.9"
    for ddp, overlap in product(("torch", "gradwire"), (True, False)):
        whole, low = rows[2, ddp, "none", overlap], rows[2, ddp, low_rank, overlap]
        assert (whole["payload_bytes_per_step"], whole["compression_ratio"], whole["tuned"]) == (dense, 1, None)
        assert low["compression_ratio"] > 50
        assert low["tuned"] == tuned
    filled = f"SGD with momentum: {low_rank} trains as {tuned}."
    assert f"As attach(..., optimizer=optimizer) does for {filled}" in measured[0].splitlines()


@pytest.mark.slow
def test_ranks_of_another_launcher_are_measured_and_what_is_emulated_is_labelled(tmp_path, unused_port, forked_python):
    path = tmp_path / "b.json"
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port)}
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    emulated = ("--compute", "emulate:resnet18-cifar@0.05", "--link", "10gbit")
    emulated += ("--order", "backward,priority")
    command = [forked_python.path, "-m", "gradwire", "bench", *QUICK, *emulated]
    ranks = [
        subprocess.Popen(
            [*command, "--world-sizes", "1,2", "--json", str(path)],
            env={**os.environ, **shared, **sizes, "OMPI_COMM_WORLD_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=110) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "2M/1G" in outputs[0][0]
    assert "started by Open MPI" in outputs[0][0]
    assert not outputs[1][0].strip()
    rows = json.loads(path.read_text())["rows"]
    orders = [(machines, order) for machines in (1, 2) for order in ("backward", "priority")]
    assert [(row["machines"], row["order"]) for row in rows] == [(1, "backward"), *orders]
    for row in rows:
        assert row["measurements"]["sec_per_iter"]["p50"] > 0.05
        compute, link = row["labels"]
        assert compute.startswith("emulated compute resnet18-cifar")
        assert link == "emulated link 10 Gbit/s"
        assert (row["slice_mb"] is None) == (row["order"] == "backward")
        bounds = row["synchronous_bound_seconds"], row["bound_seconds"]
        if row["ddp"] == "none":
            assert bounds == (None, None)
        else:
            assert row["measurements"]["sec_per_iter"]["p50"] > bounds[0] >= bounds[1] >= 0.05 - 1e-9
            assert (bounds[0] > bounds[1]) == (row["world_size"] > 1)
        assert {f"NOT REAL: {label}" for label in row["labels"]} <= set(outputs[0][0].splitlines())


def test_bounds_of_a_setting_are_those_of_its_compressor_its_ranks_and_the_slowed_link():
    config = BenchConfig(compute="emulate:resnet50", dilate=10, link="4gbit")
    for spec, ranks, expected in (("none", 4, [3.07, 3.39]), ("bf16", 4, [1.53, 1.86]), ("none", 1, [0.97, 0.97])):
        found = bounds(config, Case("gradwire", spec), ranks)
        assert [round(seconds, 2) for seconds in found.values()] == expected
    unlimited = bounds(BenchConfig(compute="emulate:resnet50"), Case("gradwire"), 4)
    assert list(unlimited.values()) == pytest.approx([0.097, 0.097])


def world(local_ranks):
    hosts = ["host"] * len(local_ranks)
    return World(None, 0, len(local_ranks), "gloo", torch.device("cpu"), timedelta(seconds=1), local_ranks, hosts)


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [
        ([0], ["1M/1G"]),
        ([0, 1, 2], ["1M/1G", "1M/2G", "1M/3G"]),
        ([*range(8), *range(8)], ["1M/1G", "1M/2G", "1M/4G", "1M/8G", "2M/8G"]),
        ([0, 1, 0, 1, 0, 1], ["1M/1G", "1M/2G", "2M/2G", "3M/2G"]),
        ([0, 0, 0, 0], ["1M/1G", "2M/1G", "4M/1G"]),
        ([0, 0, 1, 1], ["1M/1G", "2M/1G", "2M/2G"]),  # ranks dealt out to machines in turn
        ([0, 1, 2, 0, 1], ["1M/1G", "1M/2G", "1M/3G"]),  # five ranks do not divide evenly
    ],
)
def test_world_sizes_double_within_a_machine_and_then_over_machines(local_ranks, expected):
    there = world(local_ranks)
    placed = [there.placement(count) for count in world_sizes(BenchConfig(), there)]
    assert [f"{each.machines}M/{each.world_size // each.machines}G" for each in placed] == expected
