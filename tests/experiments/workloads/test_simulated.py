"""Simulated ranks against real ones on the same data."""

import json

import pytest
import torch
import torch.distributed as dist

from gradwire.compress.builder.optimizer_defaults import FEEDBACK
from gradwire.experiments.cli import main
from gradwire.experiments.compare import command as driver
from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.ranks.stopping import INTERRUPTED
from gradwire.experiments.workloads import simulated as module
from gradwire.experiments.workloads.checkpoint import Checkpoint
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.simulated import train_simulated
from gradwire.experiments.workloads.simulated_sites import train_simulated_sites
from gradwire.experiments.workloads.training import train
from gradwire.experiments.workloads.turns import in_turns

SPECS = ["int8", "topk:ratio=0.05,momentum=0.9", "powersgd:rank=2,start_iter=3", "onebit:error_feedback=0.9"]
MLP = {"model": ModelConfig("mlp", width=24), "data": DataConfig("digits"), "batch_size": 8, "eval_batches": 2}
RESNET = {"model": ModelConfig("resnet18-cifar", width=8, layers=1), "data": DataConfig("patterns"), "batch_size": 4}
SCHEDULED = {"schedule": "cosine", "warmup": 2, "momentum": 0.9, "lr": 0.05, "steps": 5}
ACCUMULATED = {"optimizer": "adamw", "lr": 0.01, "steps": 4, "sync_every": 2, "bucket_mb": 0.01}
LOCAL = {"steps": 10, "local_every": 8}
TINY = ModelConfig("gpt", width=16, layers=1, heads=1, context=16)
GPT = {"model": TINY, "data": DataConfig("text", __file__), "batch_size": 2, "eval_batches": 2}
CASES = {
    "muon": (2, {**GPT, **SCHEDULED, "optimizer": "muon", "compressors": ["powersgd:rank=2"]}),
    "autocast": (2, {**GPT, **SCHEDULED, "autocast": True, "compressors": ["none"]}),
    "methods": (2, {**MLP, **SCHEDULED, "compressors": SPECS}),
    "accumulation": (3, {**MLP, **ACCUMULATED, "compressors": ["int4"]}),
    "sites": (2, {**MLP, **SCHEDULED, **LOCAL, "autocast": True, "compressors": ["int4", "powersgd:rank=2"]}),
    "sites with buffers": (3, {**RESNET, "steps": 4, "local_every": 2, "eval_batches": 2, "compressors": ["int8"]}),
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
    trainer = train_simulated_sites if "local_every" in options else train_simulated
    return zip(options["compressors"], real, trained(options, trainer, world_size), strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_and_bytes_are_those_of_real_ranks(case, ranks):
    for spec, real, simulated in both(ranks, *CASES[case]):
        assert simulated.loss == pytest.approx(real.loss, rel=1e-5), spec
        assert simulated.eval.loss == pytest.approx(real.eval.loss, rel=1e-5), spec
        for name in ("sent_bytes_per_step", "payload_bytes_per_step", "total_sent_bytes", "warmed_up"):
            assert getattr(simulated, name) == getattr(real, name), spec


ADAMW = {**MLP, "optimizer": "adamw", "lr": 0.01, "steps": 4}


def fed_back(spec, *options):
    """The compressor as written, as it trains, and the same without what suits the optimizer."""
    return [spec, *(f"{spec}:error_feedback={option}" for option in options)]


FILLED = {
    "simulated": ({**ADAMW, "simulated": True}, fed_back("int4", "false", "true")),
    "own DDP": (ADAMW, ["topk:ratio=0.05", "topk:ratio=0.05,error_feedback=0.9", "topk:ratio=0.05,error_feedback=1"]),
    "torch's DDP": ({**MLP, "ddp": "torch", "steps": 4}, fed_back("ternary", "0.8", "1")),
    "FSDP2": ({**ADAMW, "parallel": "fsdp"}, fed_back("int8/int4", "false", "true")),
    "FSDP2, hosts": ({**ADAMW, "parallel": "fsdp"}, fed_back("none/hosts:ranks=1+int4", "false", "1")),
}


@pytest.mark.parametrize("case", FILLED)
def test_a_compressor_has_the_options_that_attach_adds_for_the_optimizer(case, ranks):
    options, specs = FILLED[case]
    given = {**options, "compressors": specs}
    found = trained(given, train_simulated, 2) if case == "simulated" else ranks.run(on_rank, 2, given)[0]
    written, filled, without = found
    assert [run.compressor for run in found] == specs
    assert [run.tuned for run in found] == [specs[1], None, None]
    assert written.parameters_digest == filled.parameters_digest != without.parameters_digest
    assert written.planned_state_bytes == filled.planned_state_bytes


class Breaks(Checkpoint):
    """A checkpoint whose training is broken off once it is written, twice."""

    broken = 0

    def of(self, ran):
        return self

    def write(self, state):
        super().write(state)
        self.broken += 1
        if self.broken < 3:
            raise KeyboardInterrupt


STOPPED = {
    "adamw": {**ADAMW, **SCHEDULED, "steps": 6, "compressors": [SPECS[2], "int4:rounding=stochastic"]},
    "muon": {**GPT, **SCHEDULED, "optimizer": "muon", "steps": 7, "compressors": ["acp-powersgd:rank=2"]},
    "accumulation": {**MLP, **ACCUMULATED, "steps": 8, "compressors": ["onebit"]},
    "buffers": {**RESNET, "lr": 0.01, "steps": 6, "eval_batches": 1, "compressors": ["adaptive"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STOPPED)
def test_a_training_that_was_stopped_ends_as_if_it_was_not(case, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 2)
    config = CompareConfig(**STOPPED[case])
    dataset = load_dataset(config.data, config.model)
    for spec in config.compressors:
        whole = train_simulated(spec, config, dataset, 2, lambda steps: None)
        checkpoint = Breaks(tmp_path, {"compressor": spec})
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                train_simulated(spec, config, dataset, 2, lambda steps: None, checkpoint.of)
        again = train_simulated(spec, config, dataset, 2, lambda steps: None, checkpoint.of)
        for name in ("parameters_digest", "loss", "eval", "sent_bytes_per_step", "total_sent_bytes"):
            assert getattr(again, name) == getattr(whole, name), (spec, name)
        assert len(again.train_seconds) == config.steps
        assert not checkpoint.path.exists()


TINY_MLP = ("--simulated", "--model=mlp", "--model.width=16", "--data=digits", "--eval-batches=1")


def test_compare_continues_a_training_of_the_same_options_alone(tmp_path, monkeypatch):
    flags = [*TINY_MLP, "--optimizer=adamw", "--compressors=topk"]
    flags += [f"--checkpoints={tmp_path / 'kept'}", f"--out={tmp_path / 'out'}", "--steps=6"]
    monkeypatch.setattr(module, "CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(driver, "write_output", lambda results, out: None)
    done = []

    def stops(self):
        done.append(self.done)
        if len(done) == 4:
            raise KeyboardInterrupt
        return step(self)

    step = module.SimulatedTraining.step
    monkeypatch.setattr(module.SimulatedTraining, "step", stops)
    assert main(["compare", *flags]) == INTERRUPTED
    assert main(["compare", *flags, "--seed=1"]) == 0
    with monkeypatch.context() as other_release:
        other_release.setitem(FEEDBACK["Adam"], "topk", 0.5)
        assert main(["compare", *flags]) == 0
    assert main(["compare", *flags]) == 0
    assert done == [0, 1, 2, 3, *range(6), *range(6), *range(2, 6)]
    assert list((tmp_path / "kept").iterdir()) == []


def test_batch_normalisation_sees_a_rank_s_batch_alone(ranks):
    options = {**RESNET, "lr": 0.01, "steps": 4, "eval_batches": 1, "compressors": ["none"]}
    for _, real, simulated in both(ranks, 2, options):
        assert simulated.loss == pytest.approx(real.loss, rel=1e-4)


def test_results_say_that_ranks_are_simulated(undrawn, tmp_path, capsys):
    assert main(["compare", *TINY_MLP, "--compressors=none,int8", "--steps=2", f"--out={tmp_path}"]) == 0
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["environment"]["network"] == "simulated ranks"
    assert "No verdict: simulated ranks have no network" in capsys.readouterr().out
