"""A forked process that runs a backward is refused before it writes anywhere, and its parent trains on."""

import os

import pytest
import torch

from ..layers import Layers, inputs_of
from ..overlap import overlapped
from ..overlap.overlapped import Setting
from ..wrapping import wrapped

MESSAGE = "this process was forked after the model was set up"
TORCH = "in combination with fork-based multiprocessing"  # where its threads ran before, torch is the first to refuse


def loss_of(model, rank, step):
    return model(inputs_of(rank, step), range(4)).square().sum()


def in_child(act):
    """What `act()` raises in a forked process."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            act()
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    return told


def trained(rank, ours, spec, place, options):
    """Gradients of all steps; what a forked process says in the middle, if `place` tells where."""
    model, handle = wrapped(ours, Layers(), spec, **options)
    told, gradients = [], []
    for step in range(4):
        if step == 2 and place == "before forward":
            told.append(in_child(lambda: (loss_of(model, 7, 9)).backward()))
        loss = loss_of(model, rank, step)
        if step == 2 and place == "before backward":
            told.append(in_child((loss * 3).backward))
        loss.backward()
        gradients += [parameter.grad.clone() for parameter in model.parameters()]
        if step == 2 and place == "within the bare module":
            told.append(in_child(lambda: model.module(inputs_of(7, 9), range(4)).square().sum().backward()))
        model.zero_grad(set_to_none=not options)
    handle.close()
    return told, gradients


def both(rank, world_size, ours, spec, place, options):
    told, gradients = trained(rank, ours, spec, place, options)
    _, expected = trained(rank, ours, spec, "", options)
    return told, all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("place", ["before forward", "before backward"])
@pytest.mark.parametrize(("ours", "spec"), [(True, "none"), (True, "topk:ratio=0.1"), (False, "topk:ratio=0.1")])
def test_a_backward_in_a_forked_process_is_refused_and_changes_nothing(ranks, ours, spec, place, options):
    for told, alike in ranks.run(both, 2, ours, spec, place, options):
        assert len(told) == 1
        assert MESSAGE in told[0] or TORCH in told[0]
        assert alike


@pytest.mark.parametrize(("views", "words"), [(False, "nothing"), (True, MESSAGE)])
def test_a_forked_process_may_use_the_bare_module_unless_gradients_are_views_of_what_it_shares(ranks, views, words):
    options = {"gradient_as_bucket_view": True} if views else {}
    for (told,), alike in ranks.run(both, 2, True, "none", "within the bare module", options):
        assert words in told or TORCH in told
        assert alike


def read_while_under_way(rank, world_size):
    """What forked processes say that use a parameter, while its update is under way and after `drain()`; and the end."""
    setting = Setting(rank, "priority", net=overlapped.Layers)
    used = setting.model.module[0].weight
    told = []
    for _ in range(2):
        setting.step()
        told.append((setting.pending, in_child(lambda: used.sum().item())))
        setting.optimizer.drain()
        told.append((setting.pending, in_child(lambda: used.sum().item())))
    plain = Setting(rank, "synchronous", net=overlapped.Layers)
    for _ in range(2):
        plain.step()
    return told, overlapped.equal(setting.end(), plain.end())


def test_a_forked_process_that_uses_a_parameter_on_its_way_is_told_to_drain_before(ranks):
    for told, alike in ranks.run(read_while_under_way, 2):
        for (pending, refused), drained in zip(told[::2], told[1::2], strict=True):
            assert pending
            assert "was forked while the averages of" in refused
            assert "call the optimizer's drain() before" in refused
            assert drained == (False, "nothing")
        assert alike
