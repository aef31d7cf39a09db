"""Parameters that the user unfreezes in mid-training are averaged over sites from the next round on."""

from datetime import timedelta

import pytest
import torch

from ...ddp_core.errors import warned
from ..given import same, through_file
from . import sites as of_sites
from .sites import Net, Town, descend, together, until

MINUTE = timedelta(seconds=60)


def built(seed=0, dtype=torch.float32, **options):
    """A site that trains the last layer alone; the optimizer has all parameters."""
    model = Net(seed, dtype)
    model.first.requires_grad_(requires_grad=False)
    return of_sites.built(0, model=model, momentum=0.9, timeout=MINUTE, **options)


def unfreeze(model, seed=None):
    model.first.requires_grad_(requires_grad=True)
    if seed is not None:
        with torch.no_grad():
            model.first.weight.copy_(torch.rand(6, 4, generator=torch.Generator().manual_seed(seed)))


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def trained(rank, world_size, unfrozen_at, steps=13, reset=False, **options):
    """The first layer before it was unfrozen, after so many steps, and after the last average. `unfrozen_at`: by rank."""
    model, optimizer, local = built(**options)
    before = model.first.weight.detach().clone()
    for step in range(steps):
        if step == unfrozen_at[rank]:
            unfreeze(model, seed=rank if reset else None)
        descend(model, optimizer, rank, step)
    local.finish()
    return before, weights(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spec", ["none", "int4", "powersgd:rank=1", "topk:ratio=0.2"])
def test_an_unfrozen_parameter_trains_and_ends_alike_at_all_sites(ranks, spec, overlap):
    (before, first), (_, second) = ranks.run(trained, 2, [5, 5], compressor=spec, overlap=overlap)
    assert same(first, second)
    assert not torch.equal(before, first["first.weight"])


@pytest.mark.parametrize(
    "unfrozen_at", [[4, 7], [6, 5], [5, None], [12, 12]]
)  # 12: the last step; no round but the last
def test_sites_may_unfreeze_at_different_steps_or_one_alone(ranks, unfrozen_at):
    (before, first), (_, second) = ranks.run(trained, 2, unfrozen_at)
    assert same(first, second)
    assert not torch.equal(before, first["first.weight"])


def simulated(sites, unfrozen_at, steps, lr, momentum):
    """A round after each step, written down plainly: what is unfrozen before a step is averaged one round later."""
    models = [Net(0, torch.float64) for _ in range(sites)]
    for model in models:
        model.first.requires_grad_(requires_grad=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    common = weights(models[0])
    speed = {name: torch.zeros_like(value) for name, value in common.items()}
    for step in range(steps):
        for site, model in enumerate(models):
            if step == unfrozen_at:
                unfreeze(model)
            descend(model, optimizers[site], site, step)
        for name, anchor in common.items():
            if name.startswith("first") and step <= unfrozen_at:
                continue
            mean = sum(anchor - model.get_parameter(name) for model in models).detach() / sites
            speed[name] = momentum * speed[name] + mean
            common[name] = anchor - lr * (mean + momentum * speed[name])
            with torch.no_grad():
                for model in models:
                    model.get_parameter(name).copy_(common[name])
        buffers = [dict(model.named_buffers()) for model in models]
        for name in ("norm.running_mean", "norm.running_var"):
            mean = sum(each[name] for each in buffers) / sites
            for each in buffers:
                each[name].copy_(mean)
    return weights(models[0])


def each_step(rank, world_size):
    outer = "nesterov:lr=0.7,momentum=0.9"
    options = {"every": 1, "fragments": 1, "overlap": False, "compressor": "none", "outer": outer}
    model, optimizer, local = built(dtype=torch.float64, **options)
    for step in range(8):
        if step == 3:
            unfreeze(model)
        descend(model, optimizer, rank, step)
    local.close()
    return weights(model)


def test_the_outer_optimizer_moves_an_unfrozen_parameter_from_its_frozen_value_as_written_down_plainly(ranks):
    expected = simulated(2, 3, 8, 0.7, 0.9)
    for found in ranks.run(each_step, 2):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


def resumed(rank, world_size, stop):
    """Weights at the end, without and with a stop after so many steps. Those that resume are built frozen."""
    found = []
    for stopped in (False, True):
        model, optimizer, local = built(compressor="topk:ratio=0.3")
        for step in range(14):
            if stopped and step == stop:
                states = [through_file(each.state_dict()) for each in (model, optimizer, local)]
                local.close()
                model, optimizer, local = built(compressor="topk:ratio=0.3")
                for each, state in zip((model, optimizer, local), states, strict=True):
                    each.load_state_dict(state)
            if step >= 5:
                unfreeze(model)
            descend(model, optimizer, rank, step)
        local.finish()
        found.append(weights(model))
    return found


@pytest.mark.parametrize("stop", [6, 8, 11])  # before, at and after the round in which the parameters join
def test_a_training_that_resumes_after_an_unfreezing_changes_no_bit(ranks, stop):
    assert all(same(*pair) for pair in ranks.run(resumed, 2, stop))


def test_a_site_that_comes_after_an_unfreezing_averages_the_same_parameters():
    town, steps, came = Town(), [], []
    made = [town.meeting_place(2, f"site {place}", prefix="unfrozen") for place in range(3)]

    def run(site):
        until(lambda: site < 2 or max(steps, default=0) > 5)
        model, optimizer, local = built(at=made[site])
        if site == 2:
            came.append(site)
        while local.round < 9:
            if site < 2 and local.steps == 3:
                unfreeze(model)
            if site < 2 and local.steps == 10:  # or all is over when it comes
                until(lambda: came or "site 2" in town.waiting("unfrozen"))
            steps.append(local.steps)
            descend(model, optimizer, site, local.steps)
        local.finish()
        return weights(model), local.history[0].replaced

    (first, _), (second, _), (third, replaced) = together(3, run)
    assert same([first, first], [second, third])
    assert replaced
    assert not torch.equal(third["first.weight"], Net(0).first.weight)


def told(rank, world_size, change):
    """The warnings of a training whose model is changed after five steps."""
    model, optimizer, local = built()
    with warned("LocalSteps") as texts:
        for step in range(12):
            if step == 5 and change == "add":
                model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
            if step == 5 and change == "replace":
                model.load_state_dict(weights(model), strict=False, assign=True)
            if step == 5 and change == "unfreeze":
                unfreeze(model)
            descend(model, optimizer, rank, step)
    local.close()
    return texts


@pytest.mark.parametrize(
    ("change", "names"), [("add", "extra"), ("replace", "last.weight, last.bias"), ("unfreeze", "")]
)
def test_parameters_added_or_replaced_later_are_named_once(ranks, change, names):
    for texts in ranks.run(told, 2, change):
        assert len(texts) == bool(names)
        assert all(names in text and "create LocalSteps anew" in text for text in texts)
