"""Simulated ranks against real ones on the same data."""

import json

import pytest
import torch
import torch.distributed as dist

from gradwire.experiments.cli import main
from gradwire.experiments.compare import CompareConfig
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.simulated import train_simulated
from gradwire.experiments.workloads.training import train
from gradwire.experiments.workloads.turns import in_turns

SPECS = ["int8", "topk:ratio=0.05,momentum=0.9", "powersgd:rank=2,start_iter=3", "onebit:space=adam,feedback=0.9"]
MLP = {"model": ModelConfig("mlp", width=24), "data": DataConfig("digits"), "batch_size": 8, "eval_batches": 8}
RESNET = {"model": ModelConfig("resnet18-cifar", width=8, layers=1), "data": DataConfig("patterns"), "batch_size": 4}
SCHEDULED = {"schedule": "cosine", "warmup": 2, "momentum": 0.9, "lr": 0.05, "steps": 5}
ACCUMULATED = {"optimizer": "adamw", "lr": 0.01, "steps": 4, "sync_every": 2, "bucket_mb": 0.01}
GPT = {
    "model": ModelConfig("gpt", width=16, layers=1, heads=1, context=16),
    "data": DataConfig("text"),
    "batch_size": 2,
}
CASES = {
    "muon": (2, {**GPT, **SCHEDULED, "optimizer": "muon", "eval_batches": 2, "compressors": ["powersgd:rank=2"]}),
    "methods": (2, {**MLP, **SCHEDULED, "compressors": SPECS}),
    "accumulation": (3, {**MLP, **ACCUMULATED, "compressors": ["int4"]}),
}


def trained(options, trainer, world_size):
    config = CompareConfig(**options)
    dataset = load_dataset(config.data, config.model)
    return [trainer(spec, config, dataset, world_size, lambda steps: None) for spec in config.compressors]


def on_rank(rank, world_size, options):
    def trainer(spec, config, dataset, world_size, report):
        return in_turns([train(spec, config, dataset, dist.group.WORLD, torch.device("cpu"), report)])[0]

    return trained(options, trainer, world_size)


def both(ranks, world_size, options):
    real = ranks.run(on_rank, world_size, options)[0]
    return zip(options["compressors"], real, trained(options, train_simulated, world_size), strict=True)


@pytest.mark.parametrize("case", CASES)
def test_losses_and_bytes_are_those_of_real_ranks(case, ranks):
    for spec, real, simulated in both(ranks, *CASES[case]):
        assert simulated.loss == pytest.approx(real.loss, rel=1e-5), spec
        assert simulated.eval.loss == pytest.approx(real.eval.loss, rel=1e-5), spec
        for name in ("sent_bytes_per_step", "payload_bytes_per_step", "total_sent_bytes", "warmed_up"):
            assert getattr(simulated, name) == getattr(real, name), spec


def test_batch_normalisation_sees_a_rank_s_batch_alone(ranks):
    options = {**RESNET, "lr": 0.01, "steps": 4, "eval_batches": 1, "compressors": ["none"]}
    for _, real, simulated in both(ranks, 2, options):
        assert simulated.loss == pytest.approx(real.loss, rel=1e-4)


def test_the_user_s_random_state_is_not_touched():
    before = torch.get_rng_state()
    trained({**MLP, "steps": 2, "compressors": ["randomk", "int4:rounding=stochastic"]}, train_simulated, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_results_say_that_ranks_are_simulated(tmp_path, capsys):
    flags = ("--model=mlp", "--model.width=16", "--data=digits", "--compressors=none,int8", "--steps=2")
    assert main(["compare", "--simulated", f"--out={tmp_path}", "--eval-batches=1", *flags]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["environment"]["network"] == "simulated ranks"
    assert "No verdict: simulated ranks have no network" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--link=1gbit", "have no network"),
        ("--netlab.hosts=2", "have no network"),
        ("--backend=nccl", "without a process group"),
        ("--ddp=torch", "have no DistributedDataParallel"),
    ],
)
def test_what_simulated_ranks_cannot_have_is_refused(flag, why, capsys):
    assert main(["compare", "--simulated", flag]) == 2
    assert why in capsys.readouterr().err
