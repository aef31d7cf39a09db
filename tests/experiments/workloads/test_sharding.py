"""The main job on FSDP2, beside the same job on DistributedDataParallel."""

import json

import pytest
from torch import nn

from gradwire.experiments.cli import main
from gradwire.experiments.compare import command
from gradwire.experiments.workloads.sharding import blocks

from ...torch_versions import fsdp_of_others

JOB = ("--model=mlp", "--model.width=16", "--data=digits", "--steps=6", "--sync-every=2", "--eval-batches=4")
DIFFERENCES, WEIGHTS = "int4/none", "int4:send=weights/none"


def test_large_modules_of_lists_are_sharded_by_themselves_inner_ones_first():
    inner = nn.Sequential(nn.Linear(40, 40), nn.ReLU())
    model = nn.Sequential(nn.Linear(40, 2), inner, nn.ModuleList([nn.Linear(40, 40)]), nn.Linear(1, 1))
    assert blocks(model) == [model[2][0], model[2], inner[0], inner, model[0]]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """{compressor: results} on FSDP2, and of none on DistributedDataParallel."""
    found = {}
    for parallel, specs in (("fsdp", f"torch,none,int8/int4,{DIFFERENCES},{WEIGHTS}"), ("ddp", "none")):
        out = tmp_path_factory.mktemp(parallel) / "out"
        arguments = (f"--parallel={parallel}", f"--compressors={specs}", "--nproc=2", "--threads=1", f"--out={out}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "write_output", lambda results, out: None)
            assert main(["compare", *JOB, *arguments]) == 0
        runs = json.loads((out / "results.json").read_text())["runs"]
        found |= {f"{parallel} {run['compressor']}": run for run in runs}
    return found


@fsdp_of_others
def test_as_they_are_shards_train_as_torchs_and_as_ddp(comparison):
    assert comparison["fsdp none"]["parameters_digest"] == comparison["fsdp torch"]["parameters_digest"]
    assert comparison["fsdp none"]["loss"] == pytest.approx(comparison["ddp none"]["loss"], rel=1e-5)
    lossy, exact = (comparison[name]["eval"]["loss"] for name in ("fsdp int8/int4", "ddp none"))
    assert lossy == pytest.approx(exact, rel=2e-2)


@fsdp_of_others
def test_they_send_what_the_rules_say(comparison):
    """Of two ranks each sends half of the weights, gathered twice in each of two batches, and half of gradients."""
    sent = {name: run["sent_bytes_per_step"] for name, run in comparison.items()}
    whole = 4 * ((64 * 16 + 16) + (16 * 16 + 16) + (16 * 10 + 10))
    assert sent["fsdp none"] == pytest.approx((4 + 1) / 2 * whole)
    assert sent["fsdp torch"] == pytest.approx((4 + 2) / 2 * whole)  # Gloo sends sums twice
    assert sent["fsdp int8/int4"] < 0.4 * sent["fsdp none"]


@fsdp_of_others
def test_differences_of_weights_and_weights_themselves_stand_beside_each_other(comparison):
    """Differences travel once per step, and exact weights before the first; weights travel four times per step."""
    differences, weights, exact = (comparison[f"fsdp {spec}"] for spec in (DIFFERENCES, WEIGHTS, "none"))
    assert differences["sent_bytes_per_step"] < weights["sent_bytes_per_step"] < exact["sent_bytes_per_step"]
    off = [abs(each["eval"]["loss"] / exact["eval"]["loss"] - 1) for each in (differences, weights)]
    assert max(off) < 0.2
