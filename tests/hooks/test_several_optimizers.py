"""Several optimizers of one model, and optimizers inside of what frameworks put around them."""

import importlib.util

import pytest
import torch
from torch import nn

import gradwire
from gradwire.hooks.torch_ddp import handle_for

from .frameworks.launched import forget_accelerate
from .given import average, compressed, gradients
from .given import wrapped as wrapped_given

SHAPES = ((16, 16), (64,))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 5))


def two(model):
    """SGD with momentum for vectors alone, and for matrices an Adam, whose options then count."""
    matrices = [each for each in model.parameters() if each.ndim > 1]
    vectors = [each for each in model.parameters() if each.ndim == 1]
    return [torch.optim.AdamW(matrices), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]


def chosen(rank, world_size):
    """The compressors that each way of taking optimizers makes of `ternary`, for two, and for the second alone."""
    found = []
    for pick in (lambda optimizers: optimizers, lambda optimizers: optimizers[1]):
        model = network()
        optimizer = pick(two(model))
        handles = [compressed(kind, model, "ternary", optimizer=optimizer)[1] for kind in ("attached", "own")]
        handles.append(handle_for("ternary", model, optimizer=optimizer))
        handles.append(compressed("attached", network(), "none")[1])
        handles[-1].swap("ternary", optimizer=optimizer)
        found.append([each.compressor for each in handles])
        for each in handles:
            each.close()
    return found


def test_every_way_of_taking_optimizers_takes_several(ranks):
    for several, alone in ranks.run(chosen, 1):
        assert several == [gradwire.compressor("ternary")] * 4
        assert alone == [gradwire.compressor("ternary:error_feedback=0.8")] * 4


def overflowing(rank, world_size, together):
    """What a vector lacks in the end, after an overflow in a matrix. `together`: the vector's optimizer skips it, too."""
    ddp = wrapped_given(SHAPES, bucket_cap_mb=0.0001, find_unused_parameters=False)
    matrix, vector = ddp.module.parameters()
    optimizers, due = [torch.optim.SGD([each], lr=1.0) for each in (matrix, vector)], torch.zeros(64)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    handle = gradwire.attach(ddp, "int4:error_feedback=1", scaler=scaler, undo=True)
    for step in range(4):
        given = gradients(0, step, SHAPES)
        given[0][0, 0] = torch.inf if step == 2 else 0.0
        scaler.scale(ddp(given)).backward()
        for each in optimizers:
            scaler.unscale_(each)
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        for each in optimizers if norm.isfinite() or not together else ():
            scaler.step(each)
        scaler.update()
        ddp.zero_grad()
        due += given[1] if norm.isfinite() else 0.0
    handle.swap("none")
    return due + vector.detach() - average(ddp, [torch.zeros(shape) for shape in SHAPES])["p1"] / scaler.get_scale()


def test_optimizers_that_skip_an_overflow_together_lose_nothing_and_stay_finite(ranks):
    (lost,), (apart,) = (ranks.run(overflowing, 1, together) for together in (True, False))
    torch.testing.assert_close(lost, torch.zeros(64), rtol=0, atol=1e-5)
    assert not apart.isfinite().all()  # the page says so


def counted(rank, world_size):
    """At each step of a loop: steps that local SGD has counted after the first and after the last optimizer's."""
    model = network()
    optimizers = two(model)
    local = gradwire.LocalSteps(model, optimizers, every=2, fragments=1, compressor="none", overlap=False)
    seen = []
    for step in range(4):
        inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * rank + step))
        model(inputs).square().mean().backward()
        for each in optimizers:
            each.step()
            seen.append((local.steps, local.round))
            each.zero_grad()
    local.finish()
    return seen, [each.detach().clone() for each in model.parameters()]


def test_rounds_of_local_sgd_begin_after_the_last_optimizer_s_step(ranks):
    answers = ranks.run(counted, 2)
    for seen, parameters in answers:
        assert seen == [(0, 0), (1, 0), (1, 0), (2, 1), (2, 1), (3, 1), (3, 1), (4, 2)]
        torch.testing.assert_close(parameters, answers[0][1], rtol=0, atol=0)


def by_accelerate(optimizer):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare_optimizer(optimizer)


def by_fabric(optimizer):
    from lightning_fabric import Fabric

    return Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)


AROUND = {"accelerate": by_accelerate, "lightning_fabric": by_fabric}


def wrapped(rank, world_size, package):
    """Parameters after steps of two optimizers that a framework has wrapped, without overlap and with it."""
    ends = []
    for overlapped in (False, True):
        forget_accelerate() if package == "accelerate" else None
        model = gradwire.DistributedDataParallel(network(), compressor="none")
        optimizers = [AROUND[package](each) for each in two(model)]
        if overlapped:
            optimizers = gradwire.overlap(model, optimizers)
        for step in range(4):
            inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * rank + step))
            model(inputs).square().mean().backward()
            under_way = model._overlap is not None and model._overlap.pending
            for each in optimizers:
                each.step()
                each.zero_grad()
        if overlapped:
            optimizers[0].drain()
            assert optimizers[1].report().order == "backward"
        ends.append([each.detach().clone() for each in model.parameters()])
        model.compression.close()
    return *ends, under_way


@pytest.mark.parametrize("package", AROUND)
def test_optimizers_that_a_framework_has_wrapped_are_overlapped(ranks, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for without, overlapped, under_way in ranks.run(wrapped, 1, package):
        torch.testing.assert_close(overlapped, without, rtol=0, atol=0)
        assert under_way
