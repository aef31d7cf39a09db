"""Advice on real ranks: what it measures, what it leaves as it was, what it refuses."""

import copy
import os
import re
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire
from gradwire.ddp_core import Link, Paced
from gradwire.ddp_core.measure.clock import clock_of
from gradwire.ddp_core.transport import host_places
from gradwire.experiments.advice import Choice
from gradwire.experiments.advice import trials as trials_module
from gradwire.experiments.advice.candidates import MUON, Candidate
from gradwire.experiments.advice.predict import Prediction
from gradwire.experiments.advice.rank_group import RankGroup, cores_each
from gradwire.experiments.advice.timed_training import Training
from gradwire.experiments.advice.trials import Trials

from ...ranks import GROUP_TIMEOUT

AT_ONCE = 0.9 * GROUP_TIMEOUT.total_seconds()  # on a busy machine: whoever waits for another rank takes longer
SLOW = 5e5  # bytes a second: what it carries takes much longer than all else, however busy the machine is


class Noisy(nn.Module):
    """Layers that are used in order, dropout, running means, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 64)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs):
        return self.last(torch.dropout(self.norm(self.first(inputs)).relu(), 0.5, train=True))


def loss_of(model, batch):
    return model(batch).square().mean()


def trained(seed=0):
    """A model, its optimizer after a step, and gradients that wait for the next one."""
    torch.manual_seed(seed)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    batch = torch.randn(8, 64)
    for _ in range(2):
        loss_of(model, batch).backward()
        optimizer.step()
    return model, optimizer, batch


def everything(model, optimizer):
    """All that advice might change."""
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), grads, torch.get_rng_state()))


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def asked(rank, world_size, rate=SLOW, trial_seconds=0, **options):
    """What advice says here, and whether all is as before."""
    model, optimizer, batch = trained(seed=rank)  # DDP would give all ranks the weights of rank 0
    before = everything(model, optimizer)
    slow = partial(Paced, link=Link(rate))
    advice = gradwire.advise(model, loss_of, batch, optimizer, transport=slow, trial_seconds=trial_seconds, **options)
    computation, (cost, *_) = advice.measured.computation, advice.measured.costs.values()
    return {
        "text": str(advice),
        "text, Muon": str(replace(advice, family=MUON)),
        "line": advice.line,
        "specs": [(choice.spec, choice.order) for choice in advice.here.choices],
        "tried": {(choice.spec, choice.order): choice.tried for choice in advice.here.choices if choice.tried},
        "steps": [choice.step for choice in advice.here.choices],
        "sent": {choice.spec: choice.prediction.sent_bytes for choice in advice.here.choices},
        "ranks": [forecast.ranks for forecast in advice.elsewhere],
        "ready": list(computation.ready),
        "needed": sorted(computation.needed, key=computation.needed.get),
        "beta": cost.link.beta,
        "same": equal(before, everything(model, optimizer)),
    }


@pytest.fixture(scope="module")
def advised(ranks):
    return ranks.run(asked, 2, compressors=["int4", "powersgd:rank=1"], hosts=[16, 1000])


def test_all_ranks_get_the_same_advice_and_nothing_of_the_training_changes(advised):
    first, second = advised
    assert first == second
    assert first["same"]


def test_on_a_slow_link_the_recommended_line_compresses(advised):
    assert '"int4"' in advised[0]["line"]


def test_a_warm_up_is_mentioned_with_the_optimizers_whose_loss_it_lowered(advised):
    mentioned = "A warm-up lowers the loss: add start_iter=N,warmup=int8"
    assert mentioned in advised[0]["text, Muon"]
    assert mentioned not in advised[0]["text"]


def test_with_muon_the_line_to_paste_says_that_optimizer_is_a_list(advised):
    assert "[muon, adamw]" in advised[0]["text, Muon"]
    assert "[muon, adamw]" not in advised[0]["text"]


def test_each_method_is_predicted_in_both_orders_the_fastest_first(advised):
    specs = {(spec, order) for spec in ("none", "int4", "powersgd:rank=1") for order in ("backward", "priority")}
    assert set(advised[0]["specs"]) == specs
    assert advised[0]["steps"] == sorted(advised[0]["steps"])
    assert advised[0]["ranks"] == [16, 1000]


def test_the_link_s_rate_and_the_bytes_are_those_that_there_are(advised):
    elements = sum(p.numel() for p in Noisy().parameters())
    assert advised[0]["beta"] == pytest.approx(1 / SLOW, rel=0.3)
    assert advised[0]["sent"]["none"] == 4 * elements
    plan = gradwire.plan(Noisy(), "int4", world_size=2)
    assert advised[0]["sent"]["int4"] == pytest.approx(plan.sent_bytes_per_step, rel=0.01)


def asked_one_way(rank, world_size):
    """What advice says where rank 1 sends more slowly than rank 0."""
    return asked(rank, world_size, rate=SLOW if rank == 1 else 20 * SLOW, compressors=["none"])


def test_of_two_directions_predictions_take_the_slower_one(ranks):
    for answer in ranks.run(asked_one_way, 2):
        assert answer["beta"] == pytest.approx(1 / SLOW, rel=0.3)
        assert min(answer["steps"]) > 0.7 * answer["sent"]["none"] / SLOW


def test_gradients_get_ready_from_the_last_layer_on_and_are_needed_from_the_first(advised):
    ready, needed = (advised[0][name] for name in ("ready", "needed"))
    assert ready.index("last.weight") < ready.index("first.weight") < ready.index("unused")
    assert needed.index("first.weight") < needed.index("norm.weight") < needed.index("last.weight")


FAST = 1e8  # bytes a second


def test_what_is_recommended_and_none_are_tried_and_all_stays_as_it_was(ranks):
    first, second = ranks.run(asked, 2, rate=FAST, trial_seconds=30, compressors=["int4"])
    assert first == second
    assert first["same"]
    assert "failed when tried" not in first["text"]
    assert ("none", "backward") in first["tried"]
    assert all(seconds > 0 for seconds in first["tried"].values())
    assert first["steps"] == sorted(first["steps"])


def asked_of_muon(rank, world_size):
    """What trials take with Muon and AdamW beside it, the losses that were looked up, and whether all is as before."""
    model, _, batch = trained()
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    several = [torch.optim.Muon(matrices, 0.01), torch.optim.AdamW(vectors)]
    before = copy.deepcopy([model.state_dict(), *(each.state_dict() for each in several)])
    advice = gradwire.advise(model, loss_of, batch, several, compressors=["int4"], trial_seconds=30)
    tried = {choice.order for choice in advice.here.choices if choice.tried}
    after = [model.state_dict(), *(each.state_dict() for each in several)]
    return advice.family, tried, advice.failures, equal(before, after)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_training_with_several_optimizers_is_tried_and_stays_as_it_was(ranks):
    for family, tried, failures, same in ranks.run(asked_of_muon, 2):
        assert family == "Muon"
        assert "backward" in tried
        assert failures == ()
        assert same


def needs_the_bare_model(model, batch):
    return loss_of(model, batch) + model.unused.sum()


def test_a_training_that_takes_no_wrapped_model_stays_predicted(ranks):
    texts = ranks.run(asked_of_its_own, 2)
    for text in texts:
        assert text == texts[0]
        assert "failed when tried: none: rank 0: AttributeError" in text
        assert text.count("\nbf16 ") == 2
        assert "has no attribute 'unused'" in text
        assert "No verdict: all ranks share the CPUs of this host" in text


def sockets():
    """How many this process has."""
    files = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(file.is_symlink() and os.readlink(file).startswith("socket") for file in files)


def fails_in_a_trial(rank, world_size, order):
    """What a trial tells where rank 1 fails in its fourth step, whether the group carries on, and the sockets after each."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    steps = 0

    def failing(model, batch):
        nonlocal steps
        steps += rank
        if steps == 4:
            steps = 0
            raise KeyError("bad batch")
        return loss_of(model, batch)

    group, cpu = torch.distributed.group.WORLD, torch.device("cpu")
    here = RankGroup.found(group, cpu, one_level=True)
    copied = partial(Training, model, failing, batch, optimizer, clock_of(cpu))
    trials = Trials(here, copied, None, None, GROUP_TIMEOUT, unused=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials_module, "PATIENCE", timedelta(seconds=15))
        choice, left = Choice(Candidate("bf16"), order, Prediction(0.0, 0.0, 0.0), 0.0), []
        for _ in range(3):
            tried = trials.step(choice, 4)
            left.append(sockets())
        deadline = time.monotonic() + 10
        while sockets() > left[0] and time.monotonic() < deadline:
            time.sleep(0.01)  # they may take a moment to close
        left.append(sockets())
    return tried, here.gather(rank), left


@pytest.mark.parametrize("order", ["backward", "priority"])
def test_a_rank_that_fails_in_a_trial_ends_it_on_all_of_them_and_harms_no_group(ranks, order):
    first, second = ranks.run(fails_in_a_trial, 2, order=order, timeout=AT_ONCE)
    assert first[:2] == second[:2]
    tried, told, _ = first
    assert tried.step is None
    assert "rank 1: KeyError: 'bad batch'" in tried.failure
    assert told == [0, 1]
    for _, _, left in (first, second):  # a trial closes its connections
        assert left[-1] <= left[0]


def asked_of_its_own(rank, world_size):
    model, optimizer, batch = trained()
    return str(gradwire.advise(model, needs_the_bare_model, batch, optimizer, compressors=["bf16"], trial_seconds=30))


def no_scalar(model, batch):
    return model(batch)


DIFFERENT = [  # options of rank 0, of rank 1, what is told
    ({"compressors": ["int8"]}, {"compressors": ["int4"]}, "of compressors: rank 0 has"),
    ({}, {"tolerance": 0.5}, "of tolerance: rank 0 has 0.03, rank 1 has 0.5"),
    ({}, {"worthwhile": 2}, "of worthwhile: rank 0 has 1.1, rank 1 has 2"),
    ({"hosts": [16]}, {}, "of hosts: rank 0 has [16], rank 1 has []"),
    ({}, {"bucket_mb": 5}, "of bucket_mb: rank 0 has None, rank 1 has 5"),
    ({"trial_seconds": 0}, {"trial_seconds": 1}, "of trial_seconds: rank 0 has 0, rank 1 has 1"),
    ({}, {"optimizer": torch.optim.AdamW}, "of optimizer: rank 0 has SGD with momentum, rank 1 has AdamW"),
    ({"hosts": [16]}, {"hosts": [16]}, "hosts=[16] needs ranks on two hosts or more, and all of these are on one"),
    ({"loss_fn": no_scalar}, {"loss_fn": no_scalar}, "got a tensor of (8, 64)"),
]


def refusals(rank, world_size):
    """What a rank is told in each case."""
    model, optimizer, batch = trained()
    told = []
    for *cases, words in DIFFERENT:
        options = dict(cases[rank])
        chosen = options.pop("optimizer")(model.parameters()) if "optimizer" in options else optimizer
        with pytest.raises(ValueError, match=re.escape(words)) as raised:
            gradwire.advise(model, options.pop("loss_fn", loss_of), batch, chosen, **options)
        told.append(str(raised.value))
    return told


def test_what_ranks_do_not_agree_on_or_cannot_try_is_refused_on_every_rank(ranks):
    first, second = ranks.run(refusals, 2)
    assert first == second


WRONG = [  # options of rank 1, what is told
    ({"compressors": ["nope"]}, "unknown compressor 'nope'"),
    ({"hosts": [1]}, "hosts are whole numbers"),
    ({"tolerance": -1}, "tolerance is a part of the loss"),
    ({"trial_seconds": -1}, "trial_seconds is how long steps may be tried"),
]


def wrong_on_one(rank, world_size):
    """What a rank is told where rank 1 asks for what makes no sense."""
    model, optimizer, batch = trained()
    told = []
    for options, expected in WRONG:
        with pytest.raises(ValueError, match=expected) as raised:
            gradwire.advise(model, loss_of, batch, optimizer, **(options if rank == 1 else {}))
        told.append(str(raised.value))
    return told


def test_arguments_that_one_rank_refuses_end_advice_on_all_at_once(ranks):
    others, own = ranks.run(wrong_on_one, 2, timeout=AT_ONCE)
    assert all("steps cannot be tried on rank 1" in told for told in others)
    assert not any("rank 1" in told for told in own)


class Uncopied(Noisy):
    """A model that one rank cannot copy."""

    def __deepcopy__(self, memo):
        raise RuntimeError("no copies here")


def raises_on_one(rank, world_size):
    """What a rank is told where rank 1 cannot copy its model, then where its loss fails."""
    model, optimizer, batch = trained()

    def failing(model, batch):
        if rank == 1:
            raise KeyError("bad batch")
        return loss_of(model, batch)

    def error(loss_fn):
        with pytest.raises((ValueError, KeyError)) as raised:
            gradwire.advise(model, loss_fn, batch, optimizer, compressors=["bf16"])
        return raised.type.__name__, str(raised.value)

    from_loss = error(failing)
    if rank == 1:
        model.__class__ = Uncopied
    return from_loss, error(loss_of)


def test_an_error_on_one_rank_ends_advice_on_all(ranks):
    (loss, copied), (own_loss, own_copied) = ranks.run(raises_on_one, 2, timeout=AT_ONCE)
    for name, told in (loss, copied):
        assert name == "ValueError"
        assert "steps cannot be tried on rank 1" in told
    assert "KeyError: 'bad batch'" in loss[1]
    assert "no copies here" in copied[1]
    assert own_loss[0] == "KeyError"
    assert own_copied[0] == "ValueError"


def uses_the_outer_model(rank, world_size):
    model, optimizer, batch = trained()
    before = everything(model, optimizer)[2]
    with pytest.raises(ValueError, match="used another model than the one it is given") as raised:
        gradwire.advise(model, lambda _, batch: loss_of(model, batch), batch, optimizer)
    return str(raised.value), equal(before, everything(model, optimizer)[2])


def test_a_loss_of_another_model_is_refused_and_its_gradients_stay(ranks):
    assert all(same for _, same in ranks.run(uses_the_outer_model, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressors": ["hosts+int4"]}, r"hosts\+int4 is tried without being asked for.*as in int4"),
        ({"hosts": [1]}, r"hosts are whole numbers, at least 2, such as \[16, 64\]; got 1"),
        ({"timeout": timedelta(0)}, "timeout is above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(options, message):
    with pytest.raises(ValueError, match=message):
        gradwire.advise(*trained_in_order(), **options)


def trained_in_order():
    model, optimizer, batch = trained()
    return model, loss_of, batch, optimizer


def of_16_bits(rank, world_size):
    model = nn.Linear(64, 64).to(torch.bfloat16)
    batch = torch.ones(4, 64, dtype=torch.bfloat16)
    advice = gradwire.advise(model, loss_of, batch, torch.optim.SGD(model.parameters(), 0.1), trial_seconds=0)
    return {choice.spec for choice in advice.here.choices}


def test_gradients_of_16_bits_are_not_compared_with_16_bits(ranks):
    for specs in ranks.run(of_16_bits, 2):
        assert specs >= {"none", "int8"}
        assert "bf16" not in specs


def test_without_a_process_group_the_way_to_one_is_told():
    with pytest.raises(RuntimeError, match="init_process_group"):
        gradwire.advise(*trained_in_order())


def on_two_hosts(rank, world_size):
    """Advice where every two ranks take themselves for a host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_places, "host_name", lambda: f"host {rank // 2}")
        model, optimizer, batch = trained()
        advice = gradwire.advise(model, loss_of, batch, optimizer, compressors=["int4"], hosts=[8], trial_seconds=0)
    scopes = {scope for _, _, scope in advice.measured.costs}
    sent = {choice.spec: choice.prediction.sent_bytes for choice in advice.here.choices}
    return {"scopes": scopes, "sent": sent, "text": str(advice), "ranks": advice.elsewhere[0].ranks}


def test_hosts_of_several_ranks_are_tried_with_two_levels(ranks):
    first, *others = ranks.run(on_two_hosts, 4)
    assert all(other == first for other in others)
    assert first["scopes"] == {"all", "host", "across"}
    elements = sum(p.numel() for p in Noisy().parameters())
    assert first["sent"]["none"] == 2 * 3 / 4 * 4 * elements
    assert first["sent"]["hosts+none"] == pytest.approx(4 * elements / 2, rel=0.01)
    assert first["ranks"] == 16
    for told in ("hosts+int4", "among a host", "among 2 hosts", "8 of 2 ranks"):
        assert told in first["text"]


def pinned(rank, world_size):
    """Cores for each rank, where every rank is on one of its own."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[rank % len(before)]})
    try:
        here = RankGroup.found(torch.distributed.group.WORLD, torch.device("cpu"), one_level=True)
    finally:
        os.sched_setaffinity(0, before)
    return here.cores, len({sorted(before)[each % len(before)] for each in range(world_size)}) / world_size


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are chosen on Linux")
def test_ranks_that_are_pinned_share_the_cores_of_all(ranks):
    for found, expected in ranks.run(pinned, 2):
        assert found == expected


def test_cores_are_those_of_the_machine_that_has_fewest_for_a_rank():
    assert cores_each([("a", [0]), ("a", [1]), ("b", [0, 1])]) == 1.0
    assert cores_each([("a", range(8)), ("a", range(8)), ("b", [0, 1, 2])]) == 3.0
