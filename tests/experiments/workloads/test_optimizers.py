import math

import pytest
import torch

from gradwire.experiments.workloads.models import ModelConfig, build_model
from gradwire.experiments.workloads.optimizers import optimizers_for, schedule_for
from gradwire.experiments.workloads.training import TrainingConfig


def rates(name, warmup, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = schedule_for(optimizer, name, warmup, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found, optimizer.param_groups[0]["lr"]


def test_the_rate_grows_in_equal_steps_and_stays():
    assert rates("constant", 4, 6)[0] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_an_optimizer_has_a_rate_of_its_own_where_none_is_given():
    assert [TrainingConfig(optimizer=each).rate for each in ("sgd", "adamw", "muon")] == [0.1, 0.003, 0.005]
    assert TrainingConfig(optimizer="muon", lr=0.1).rate == 0.1


def test_cosine_falls_from_the_rate_to_zero():
    found, after = rates("cosine", 0, 8)
    assert found == pytest.approx([1 + math.cos(math.pi * step / 8) for step in range(8)])
    assert after == pytest.approx(0)


@pytest.mark.parametrize(("spec", "kept"), [("topk", 0.9), ("topk:momentum=0.9", 0.0), ("dgc:momentum=0.9", 0.0)])
def test_the_optimizer_has_no_momentum_where_the_workers_have(spec, kept):
    model = torch.nn.Linear(2, 2)
    (sgd,), (adamw,) = (optimizers_for(model, spec, name, 0.1, 0.9) for name in ("sgd", "adamw"))
    assert sgd.param_groups[0]["momentum"] == kept
    assert adamw.param_groups[0]["betas"][0] == kept


@pytest.mark.parametrize(("spec", "kept"), [("int4", (0.95, 0.9)), ("topk:momentum=0.9", (0.0, 0.0))])
def test_muon_has_the_matrices_of_blocks_and_adamw_all_other_parameters(spec, kept):
    model = build_model(ModelConfig("gpt", width=8, layers=2, heads=1, context=4))
    muon, adamw = optimizers_for(model, spec, "muon", 0.1, 0.9)
    assert {each.shape for each in muon.param_groups[0]["params"]} == {(24, 8), (8, 8), (32, 8), (8, 32)}
    assert len(muon.param_groups[0]["params"]) == 2 * 4
    both = [*muon.param_groups[0]["params"], *adamw.param_groups[0]["params"]]
    assert set(map(id, both)) == set(map(id, model.parameters()))
    assert len(both) == len(list(model.parameters()))
    assert (muon.param_groups[0]["momentum"], adamw.param_groups[0]["betas"][0]) == kept
