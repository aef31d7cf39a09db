"""Which saved states of local steps are taken."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from gradwire.experiments.workloads.simulated_sites import Exchange, SimulatedSites
from gradwire.hooks.local_sgd.inside import Inside
from gradwire.hooks.local_sgd.saved import FORMAT, load

from .sites import GRACE, built, descend, together

EMPTY = {"training": "", "steps": 8, "round": 2, "parameters": {}, "fragments": [], "buffers": torch.zeros(0)}
EMPTY |= {"inside": [0, 1], "axis": {}, "unfrozen": {}}


def taken(number, setup):
    """The steps of a state of a format, of a model without parameters."""
    rounds = SimpleNamespace(fragments=[], buffers=torch.zeros(0), digest=lambda: 77, training="", round=0)
    state = {**EMPTY, "gradwire_local_steps": number, "setup": setup}
    steps, _, _ = load(state, "every=4", rounds, Inside(), fresh=True)
    assert rounds.lineage == 77  # sites that load different models find out
    return steps


def test_a_state_of_another_format_or_setup_is_refused():
    assert taken(FORMAT, "every=4") == 8
    for number in (FORMAT - 1, FORMAT + 1):
        with pytest.raises(ValueError, match="load it with the version of gradwire that wrote it"):
            taken(number, "every=4")
    with pytest.raises(ValueError, match="saved with every=8, here it is every=4"):
        taken(FORMAT, "every=8")


@pytest.fixture
def local():
    """A site alone, in the midst of training, with an average that is not applied yet."""
    at = SimulatedSites(Exchange(1), 0, timedelta(minutes=1))
    model, optimizer, made = built(0, at, compressor="none")
    for step in range(3):
        descend(model, optimizer, 0, step)
    yield made
    made.close()


def without_captured(state):
    """One parameter of two lacks what it was when its average left."""
    fields = {name: dict(each) for name, each in state["parameters"].items()}
    next(each for each in fields.values() if "captured" in each).pop("captured")
    return {"parameters": fields}


def with_another_field(state):
    return {"parameters": {name: {**each, "join": each["anchor"]} for name, each in state["parameters"].items()}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda state: {"buffers": state["buffers"][:1]},
            "the saved buffers .* 12 elements of torch.float32: got 1 of",
        ),
        (lambda state: {"buffers": torch.ones(13)}, "the saved buffers .* 12 elements of torch.float32: got 13 of"),
        (lambda state: {"buffers": state["buffers"].double()}, "the saved buffers .*: got 12 of torch.float64"),
        (lambda state: {"buffers": None}, "the saved buffers .*: got NoneType"),
        (lambda state: {"fragments": state["fragments"][:1]}, "no list of 2 fragments"),
        (lambda state: {"steps": "3"}, "steps are a whole number"),
        (lambda state: {"round": None}, "the round from -1 on; got 3 and None"),
        (without_captured, "different fields of the parameters"),
        (with_another_field, "a captured tensor at most; got 'anchor', 'momentum'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(local, change, words):
    saved = local.state_dict()
    assert any("captured" in each for each in saved["parameters"].values())
    with pytest.raises(ValueError, match=words):
        local.load_state_dict({**saved, **change(saved)})
    after = local.state_dict()
    for name, fields in saved["parameters"].items():
        assert fields.keys() == after["parameters"][name].keys()
        assert all(torch.equal(numbers, after["parameters"][name][field]) for field, numbers in fields.items())
    assert torch.equal(saved["buffers"], after["buffers"])
    assert (saved["steps"], saved["round"]) == (after["steps"], after["round"])


def test_a_site_that_returns_with_an_old_checkpoint_trains_from_the_others_model_at_once(places):
    made, returned, ends = [places(3, grace=GRACE) for _ in range(4)], threading.Event(), {}

    def begun(at):
        return built(0, at, every=2, compressor="none")

    def trained(site, rounds, model, optimizer, local):
        while local.round < rounds:
            descend(model, optimizer, site, local.steps)

    def stays(site):
        here = begun(made[site])
        trained(site, 5, *here)
        while not returned.is_set():
            descend(*here[:2], site, 0)
            time.sleep(0.05)
        trained(site, ends.setdefault("round", here[2].round + 4), *here)
        here[2].finish()
        return here[2].round

    def returns(site):
        model, optimizer, local = begun(made[site])
        trained(site, 2, model, optimizer, local)
        saved = {name: each.clone() for name, each in model.state_dict().items()}, local.state_dict()
        local.close()
        time.sleep(1.0)  # the others go on
        model, optimizer, local = begun(made[3])
        model.load_state_dict(saved[0])
        local.load_state_dict(saved[1])
        now = local.round
        at_once = all(torch.equal(part.anchor, part.now()) for part in local._parts)
        local.close()
        returned.set()
        return now > saved[1]["round"], at_once

    *rounds, found = together(3, lambda site: returns(site) if site == 2 else stays(site))
    assert found == (True, True)
    assert rounds[0] == rounds[1]
