"""Trainings in turns."""

import pytest
import torch
import torch.distributed as dist

from gradwire.experiments.compare.config import CompareConfig
from gradwire.experiments.workloads.data import DataConfig, load_dataset
from gradwire.experiments.workloads.models import ModelConfig
from gradwire.experiments.workloads.training import train
from gradwire.experiments.workloads.turns import in_turns

SPECS = ["none", "powersgd:rank=2,start_iter=3", "topk:ratio=0.05,momentum=0.9"]
DIGITS = {"model": ModelConfig("mlp", width=24), "data": DataConfig("digits"), "batch_size": 8, "eval_batches": 4}
CASES = {
    "backward": {"steps": 11},
    "priority": {"steps": 13, "order": "priority"},
    "accumulation": {"steps": 13, "sync_every": 2, "optimizer": "adamw", "lr": 0.01},
}


def noting(name, turns, log):
    for _ in range(turns):
        log.append(name)
        yield
    return name.upper()


def test_one_that_raises_ends_all():
    def failing():
        yield
        raise LookupError("its own words")

    with pytest.raises(LookupError, match="its own words"):
        in_turns([noting("a", 3, []), failing()])


def trained(rank, world_size, options):
    """The losses and the parameters of all compressors in turns, and of each alone."""
    config = CompareConfig(**DIGITS, **options, compressors=SPECS)
    dataset = load_dataset(config.data, config.model)

    def training(spec, turns):
        device, report = torch.device("cpu"), lambda steps: None
        return train(spec, config, dataset, dist.group.WORLD, device, report, turns=turns)

    together = in_turns([training(spec, True) for spec in SPECS])
    alone = [run for spec in SPECS for run in in_turns([training(spec, False)])]
    return [[(run.loss, run.eval, run.parameters_digest) for run in runs] for runs in (together, alone)]


@pytest.mark.parametrize("case", CASES)
def test_turns_change_no_bit(case, ranks):
    for together, alone in ranks.run(trained, 2, CASES[case]):
        assert together == alone
