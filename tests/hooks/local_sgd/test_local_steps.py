import logging
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch

from gradwire import LocalSteps
from gradwire.hooks.internet import server

from .sites import EVENT, GRACE, LIMIT, Net, built, descend, together, until

PLAIN = {"outer": "sgd:lr=1,momentum=0", "compressor": "none"}


def trained(site, at, steps=8, seed=None, finish=True, before=lambda step, model: None, **options):
    """A site's model after so many steps, and what averaged it."""
    model, optimizer, local = built(site if seed is None else seed, at, **{"momentum": 0.9, **options})
    for step in range(steps):
        before(step, model)
        descend(model, optimizer, site, step)
    if finish:
        local.finish()
    return model, optimizer, local


def numbers(model):
    return [each.detach().clone() for each in model.state_dict().values() if each.is_floating_point()]


def assert_same(models):
    first, *others = map(numbers, models)
    for other in others:
        for left, right in zip(first, other, strict=True):
            assert torch.equal(left, right)


def assert_others_go_on(made, steps, meetings):
    """When the last of three sites leaves after so many steps, the others end with one model. `meetings`: counts them."""
    together_before = 1 + steps // 2  # at the start, and after every second step

    def run(site):
        def before(step, model):
            if step == steps:
                made[site].grace = GRACE

        last = site == 2
        found = trained(site, made[site], steps + (not last) * 4, finish=not last, before=before, overlap=False)
        if last:
            until(lambda: meetings() > together_before)
            found[2].close()
        return found

    first, second, _ = together(3, run)
    assert_same([first[0], second[0]])
    sizes = [stats.sites for stats in first[2].history]
    assert sizes == [3] * together_before + [2] * (len(sizes) - together_before)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("spec", ["none", "int4", "powersgd:rank=1", "topk:ratio=0.2"])
def test_all_sites_end_with_the_same_model(places, spec, overlap):
    made = [places(3) for _ in range(3)]
    results = together(3, lambda site: trained(site, made[site], compressor=spec, overlap=overlap))
    assert_same(model for model, _, _ in results)
    assert results[0][2].round == 8 // 2 + 2
    assert all(stats.sites == 3 for stats in results[0][2].history)


def test_memory_that_a_loop_puts_in_another_s_place_is_averaged(places):
    def replacing(site):
        def before(step, model):
            model.seen = model.seen + site + 1  # as running statistics are often written
            if step == 5:
                flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
                torch.nn.utils.vector_to_parameters(flat, model.parameters())

        (model := Net(site)).register_buffer("seen", torch.zeros(2))
        return trained(site, made[site], 16, before=before, model=model, overlap=False, **PLAIN)[0]

    made = [places(2), places(2)]
    first, second = together(2, replacing)
    assert_same([first, second])
    assert torch.equal(first.seen, torch.full((2,), 16 * 1.5))


def muon_alone(place, **options):
    """The model of one site that trains with Muon, and SGD beside it."""
    model = Net()
    matrices, vectors = ([each for each in model.parameters() if (each.ndim == 2) is kind] for kind in (True, False))
    optimizers = [torch.optim.Muon(matrices, lr=0.1), torch.optim.SGD(vectors, lr=0.1)]
    local = LocalSteps(
        model, optimizers, at=place, every=2, fragments=1, overlap=False, **{"compressor": "none", **options}
    )
    for step in range(6):
        for optimizer in optimizers:
            descend(model, optimizer, 0, step)
    local.finish()
    return model


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with torch 2.9")
def test_muon_takes_the_outer_optimizer_that_was_found_for_it(places):
    model = muon_alone(places(1))
    assert_same([model, muon_alone(places(1), outer="muloco")])
    assert not torch.equal(model.first.weight, muon_alone(places(1), outer="average").first.weight)


def test_a_site_that_is_gone_is_left_out_and_the_others_go_on(places, town, request, caplog):
    made = [places(3, f"site {place}") for place in range(3)]
    with caplog.at_level(logging.WARNING):
        assert_others_go_on(made, 4, lambda: town.store._gatherings[request.node.name].number)
    assert re.search("round 3 continues without 1 sites: with site [01], site [01]", caplog.text)


def until_round(last, model, local, optimizer, site, before):
    """Train until the sites have had so many rounds, which all of them count alike."""
    while local.round < last:
        before(local.steps)
        descend(model, optimizer, site, local.steps)
    local.finish()
    return model, local


def test_a_site_that_is_late_takes_the_others_model_and_goes_on(places, town, request):
    made, steps = [places(3, f"site {site}") for site in range(3)], [0, 0, 0]

    def run(site):
        def before(step):
            steps[site] = step
            if site == 2 and step == 5:  # it sleeps while the others have rounds without it
                until(lambda: min(steps[:2]) >= 12)
            elif site < 2 and step == 5:
                until(lambda: steps[2] == 5 and local._flight.done())
                made[site].grace = GRACE
            elif site < 2 and step == 12:
                until(lambda: min(steps[:2]) >= 12)
                made[site].grace = timedelta(seconds=LIMIT / 3)
            elif site < 2 and step == 14:  # or all is over before it is back
                until(lambda: steps[2] > 7 or "site 2" in town.waiting(request.node.name))

        model, optimizer, local = built(site, made[site])
        return until_round(12, model, local, optimizer, site, before)

    results = together(3, run)
    assert_same(model for model, _ in results)
    assert any(stats.replaced for stats in results[2][1].history[1:])
    assert not any(stats.replaced for stats in results[0][1].history[1:])


def test_a_site_that_comes_later_takes_part(places, town, request):
    made = [places(2, f"site {site}") for site in range(3)]
    steps, came = [], threading.Event()

    def run(site):
        def before(step):
            steps.append(step)
            if step == 8:  # or all would be over when it comes
                until(lambda: came.is_set() or "site 2" in town.waiting(request.node.name))

        if site == 2:
            until(lambda: max(steps, default=0) > 4)
        model, optimizer, local = built(site, made[site])
        if site == 2:
            came.set()
        return until_round(8, model, local, optimizer, site, before if site < 2 else lambda step: None)

    results = together(3, run)
    assert_same(model for model, _ in results)
    assert results[2][1].history[0].replaced
    assert results[0][1].history[-1].sites == 3


def test_numbers_that_are_not_finite_at_one_site_reach_no_other(places):
    made = [places(2), places(2)]

    def run(site):
        def before(step, model):
            if (site, step) == (1, 3):
                with torch.no_grad():
                    model.first.weight[0, 0] = torch.nan

        return trained(site, made[site], 6, before=before, momentum=0.0, every=2, fragments=1, overlap=False)

    results = together(2, run)
    assert_same(model for model, _, _ in results)
    assert all(each.isfinite().all() for each in numbers(results[0][0]))
    assert any(stats.replaced for stats in results[1][2].history[1:])


def test_buffers_of_64_bits_are_averaged_in_64_bits(places):
    def run(site):
        model = Net(site)
        model.register_buffer("seen", torch.tensor([1e9 + site, 1e-9 * site], dtype=torch.float64))
        _, optimizer, local = built(site, made[site], model, every=2, fragments=1, overlap=False, **PLAIN)
        model.seen += torch.tensor([3.0 * site, 1e-9], dtype=torch.float64)
        descend(model, optimizer, site, 0)
        local.finish()
        return model

    made = [places(2, "first"), places(2, "second")]
    first, second = together(2, run)
    assert_same([first, second])
    began = first.seen[0].item() - 1.5  # of the site that came first
    assert began in (1e9, 1e9 + 1)
    assert first.seen[1].item() == pytest.approx(1e-9 * (2 if began > 1e9 else 1), rel=1e-12)


def test_changes_and_buffers_are_averaged_by_the_weights_of_their_sites(places):
    made, weights = [places(2), places(2)], (1.0, 3.0)
    options = {"every": 1, "fragments": 1, "overlap": False, **PLAIN}

    def run(site):
        return trained(site, made[site], 1, model=Net(0, torch.float64), weight=weights[site], **options)[0]

    first, second = together(2, run)
    assert_same([first, second])
    alone = [Net(0, torch.float64) for _ in weights]
    for site, model in enumerate(alone):
        descend(model, torch.optim.SGD(model.parameters(), lr=0.1), site, 0)
    for mine, *theirs in zip(numbers(first), *map(numbers, alone), strict=True):
        average = sum(weight * each for weight, each in zip(weights, theirs, strict=True)) / 4
        torch.testing.assert_close(mine, average, rtol=1e-12, atol=1e-12)


class Masked(Net):
    """With a buffer of minus infinity, as causal masks are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((2,), -torch.inf))


def test_an_infinite_buffer_keeps_no_fragment_from_training(places):
    made = [places(2), places(2)]
    results = together(2, lambda site: trained(site, made[site], 6, model=Masked(), every=2, fragments=1)[0])
    assert_same(results)
    assert not torch.equal(results[0].last.weight, Net(0).last.weight)
    assert results[0].mask.isneginf().all()


def test_frozen_parameters_that_differ_are_refused(places):
    made = [places(2), places(2)]

    def run(site):
        model = Net(site)
        model.first.requires_grad_(requires_grad=False)
        built(site, made[site], model)[2].close()

    results = together(2, run)
    assert sum(isinstance(result, ValueError) and "set up differently" in str(result) for result in results) == 1


def test_a_site_that_gave_up_at_the_start_counts_no_more(places):
    with pytest.raises(RuntimeError, match="only 1 of 2 sites came"):
        trained(0, places(2, start=timedelta(seconds=0.2)))
    made = [places(2), places(2)]
    results = together(2, lambda site: trained(site, made[site]))
    assert results[0][2].history[0].sites == 2


def test_a_rendezvous_keeps_no_more_the_longer_it_is_used(town, places, monkeypatch):
    monkeypatch.setattr(server, "TRAININGS", 20)

    def kept_after(rounds):
        made = [places(2, prefix=f"{rounds} rounds") for _ in range(2)]
        together(2, lambda site: trained(site, made[site], steps=rounds, every=1, fragments=1))
        gathering = town.store._gatherings[f"{rounds} rounds"]
        assert gathering.number > rounds
        return len(gathering.members), len(gathering.waiting), len(made[0]._parking._places)

    assert kept_after(2) == kept_after(8) == (2, 0, 0)
    assert not town.store._answers
    for number in range(server.TRAININGS + 5):
        town.meeting_place(1, "visitor", prefix=f"visit {number}").end(0)
    assert len(town.store._gatherings) == server.TRAININGS


def test_ctrl_c_while_others_are_awaited_leaves_no_thread_that_awaits_them(places):
    at, over = places(2, "alone"), threading.Event()

    def awaited():
        return any(thread.name.startswith("gradwire-local-steps") for thread in threading.enumerate())

    def interrupt():
        while not awaited() and not over.is_set():
            time.sleep(0.01)
        if not over.wait(0.3):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupts = threading.Thread(target=interrupt, daemon=True)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  wherever it comes
        interrupts.start()
        try:
            trained(0, at)
        finally:
            over.set()
    began = time.monotonic()
    while awaited():
        assert time.monotonic() - began < EVENT
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="alone gave up waiting for other sites"):
        at.meet()
