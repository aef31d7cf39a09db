"""A training has an identity: states keep it, other trainings are refused, and what is taken over is checked."""

import threading

import pytest
import torch

from ...ddp_core.errors import warned
from . import sites
from .sites import EVENT, Net, descend, together, until
from .test_local_steps import assert_same

OPTIONS = {"every": 2, "fragments": 1, "overlap": False, "outer": "sgd:lr=1,momentum=0", "compressor": "none"}


def built(seed, at, model=None):
    return sites.built(seed, at, model, **OPTIONS)


def state_after(places, steps, prefix):
    """The states of two sites after so many steps."""
    made = [places(2, prefix=prefix) for _ in range(2)]

    def run(site):
        model, optimizer, local = built(0, made[site])
        for step in range(steps):
            descend(model, optimizer, site, step)
        state = local.state_dict()
        local.close()
        return state

    return together(2, run)


def test_an_old_checkpoint_of_another_training_replaces_nobodys_model(places):
    old = state_after(places, 16, "old")[0]
    made = [places(3) for _ in range(3)]

    def run(site):
        model, optimizer, local = built(0, made[site])
        try:
            for step in range(8):
                if (site, step) == (2, 3):
                    local.load_state_dict(old)
                descend(model, optimizer, site, step)
            local.finish()
        finally:
            local.close()
        return model, local.round

    first, second, third = together(3, run)
    assert first[1] == second[1] == 5
    assert_same([first[0], second[0]])
    assert isinstance(third, RuntimeError)
    assert f"refuses site 4: it is of training {old['training']}" in str(third)


@pytest.mark.parametrize("identity", ["", "0" * 16])
def test_a_saved_identity_is_taken_as_it_is_or_refused(places, identity):
    (state, _) = state_after(places, 4, f"identity {identity}")
    _, _, local = built(0, places(1))
    local.load_state_dict({**state, "training": identity})
    with pytest.raises(ValueError, match=r"16 hexadecimal digits, .*; got '\.\./etc'"):
        local.load_state_dict({**state, "training": "../etc"})
    with pytest.raises(ValueError, match=r"16 hexadecimal digits, .*; got 'f{16}'"):
        local.load_state_dict({**state, "training": "f" * 16})  # does not fit a tensor of whole numbers
    with pytest.raises(ValueError, match="the states are of different trainings"):
        local.load_state_dict([state, {**state, "training": "3" * 16}])
    local.close()


def test_a_first_model_that_is_not_finite_is_refused_by_name(places):
    made = [places(2) for _ in range(2)]

    def run(site):
        model = Net(0)
        with torch.no_grad():
            model.first.weight[0, 0] = torch.nan
        built(0, made[site], model)

    for error in together(2, run):
        assert isinstance(error, ValueError)
        assert "the model of site" in str(error)
        assert "not finite" in str(error)


def test_a_model_that_differs_from_the_majoritys_is_replaced_when_a_site_comes(places, town, request, caplog):
    made, begun, came = [places(3, f"site {site}") for site in range(4)], threading.Event(), threading.Event()

    def run(site):
        if site == 3:
            assert begun.wait(EVENT)
        model, optimizer, local = built(site, made[site])
        if site == 3:
            came.set()
        while local.round < 6:
            if (site, local.steps) == (1, 4):
                with torch.no_grad():
                    local._parts[0].anchor[0] += 1.0  # a bit that flipped
                begun.set()
            if local.steps == 6:  # or all is over when it comes
                until(lambda: came.is_set() or "site 3" in town.waiting(request.node.name))
            descend(model, optimizer, site, local.steps)
        local.synchronize()
        anchor = local._parts[0].anchor.clone()
        local.close()
        return anchor

    anchors = together(4, run)
    for anchor in anchors[1:]:
        assert torch.equal(anchor, anchors[0])
    assert "the model of site 1 differs from the majority's" in caplog.text


def test_a_site_that_gives_nothing_round_after_round_is_warned_and_counted(places):
    made = [places(2) for _ in range(2)]

    def run(site):
        model, optimizer, local = built(0, made[site])
        for step in range(10):
            if site == 1:
                with torch.no_grad():
                    model.first.weight[0, 0] = torch.nan
            descend(model, optimizer, site, step)
        local.close()
        return local.metrics()["missed_rounds"]

    with warned("given nothing") as texts:
        assert together(2, run) == [0, 5]
    (text,) = texts
    assert "to the last 3 rounds: its steps are wasted" in text
