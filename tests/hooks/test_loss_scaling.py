"""torch.amp.GradScaler above a hook: steps that overflow, and scales that change."""

import functools
import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire

from ..torch_versions import fsdp_of_others
from .given import Given, average, gradients
from .test_ddp_settings import network
from .test_handle import SHAPES
from .test_handle import same as alike
from .training import RATE, TINY_BUCKETS, batch, loss_of, same

SPECS = ["none", "fp16+powersgd:rank=1", "powersgd:rank=2", "topk:ratio=0.1", "onebit"]
OVERFLOW = 3  # the step that overflows
SCALE = 1024.0


def poisoned(value, gradient):
    """The gradient with one element replaced."""
    gradient = gradient.clone()
    gradient.view(-1)[1] = value
    return gradient


def attached(spec):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(network(), **TINY_BUCKETS)
    return ddp, gradwire.attach(ddp, spec, undo=True), torch.optim.SGD(ddp.parameters(), RATE, momentum=0.9)


def train_scaled(rank, spec, poison):
    """Six steps of which one overflows in one element on rank 1; with `poison` None, the five others only."""
    ddp, handle, optimizer = attached(spec)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(6):
        if step == OVERFLOW and poison is None:
            scaler.update(SCALE / 2)
            continue
        optimizer.zero_grad()
        bad = step == OVERFLOW and rank == 1
        hook = ddp.module[2].bias.register_hook(functools.partial(poisoned, poison)) if bad else None
        scaler.scale(loss_of(ddp, batch((4, 12), rank, step))).backward()
        if hook:
            hook.remove()
        scaler.step(optimizer)
        scaler.update()
    state = handle.state_dict()["parameters"]
    handle.close()
    return [p.detach().clone() for p in ddp.parameters()], state, scaler.get_scale()


def train_through_overflow(rank, world_size, poison):
    return {spec: (train_scaled(rank, spec, poison), train_scaled(rank, spec, None)) for spec in SPECS}


@pytest.mark.parametrize("poison", [math.inf, pytest.param(math.nan, marks=pytest.mark.slow)])
def test_an_overflow_step_is_skipped_by_every_rank_and_leaves_no_trace_in_any_bit(ranks, poison):
    answers = ranks.run(train_through_overflow, 2, poison)
    for outcomes in answers:
        for spec, ((parameters, state, scale), (expected, clean, _)) in outcomes.items():
            assert scale == SCALE / 2, spec
            assert same(parameters, expected), spec
            assert same(parameters, answers[0][spec][0][0]), spec
            assert state.keys() == clean.keys()
            assert all(same(state[name].values(), clean[name].values()) for name in clean), spec


def train_with_scales(rank, spec, scales):
    ddp, handle, optimizer = attached(spec)
    before = scales[0]
    for step, scale in enumerate(scales):
        if scale != before:
            handle.rescale(scale / before)
        before = scale
        optimizer.zero_grad()
        (loss_of(ddp, batch((4, 12), rank, step)) * scale).backward()
        for parameter in ddp.parameters():
            parameter.grad /= scale
        optimizer.step()
    handle.close()
    return [p.detach().clone() for p in ddp.parameters()]


def train_unscaled_and_with(rank, world_size, specs, scales):
    return {
        spec: (train_with_scales(rank, spec, [1.0] * len(scales)), train_with_scales(rank, spec, scales))
        for spec in specs
    }


@pytest.mark.parametrize(
    ("specs", "scales"),
    [
        (SPECS[1:3], [SCALE] * 4),
        (SPECS, [SCALE, SCALE, 2 * SCALE, SCALE / 2, SCALE / 2]),
    ],
)
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(ranks, specs, scales):
    for outcomes in ranks.run(train_unscaled_and_with, 2, specs, scales):
        for spec, (unscaled, scaled) in outcomes.items():
            assert same(unscaled, scaled), spec


def train_following(rank, spec, resume):
    """Eight steps with a scale that doubles after every second one; with `resume` anew after the fourth."""
    ddp, handle, optimizer = attached(spec)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    handle.follow(scaler)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, batch((4, 12), rank, step))).backward()
        scaler.step(optimizer)
        scaler.update()
        if resume and step == 3:
            saved, scale = handle.state_dict(), scaler.state_dict()
            handle.close()
            ddp = DistributedDataParallel(ddp.module, **TINY_BUCKETS)
            scaler = torch.amp.GradScaler("cpu", growth_interval=2)
            handle = gradwire.attach(ddp, spec, scaler=scaler)
            handle.load_state_dict(saved)
            scaler.load_state_dict(scale)
    handle.close()
    return [p.detach().clone() for p in ddp.parameters()], scaler.get_scale()


def train_followed(rank, world_size, specs):
    return {
        spec: (
            train_with_scales(rank, spec, [1.0] * 8),
            train_following(rank, spec, resume=False),
            train_following(rank, spec, resume=True),
        )
        for spec in specs
    }


def test_a_handle_that_follows_a_scaler_gives_the_bits_of_no_scaling_resumed_or_not(ranks):
    for outcomes in ranks.run(train_followed, 2, SPECS[::2]):
        for spec, (unscaled, (followed, scale), (resumed, _)) in outcomes.items():
            assert scale == 16 * SCALE
            assert same(unscaled, followed), spec
            assert same(unscaled, resumed), spec


def train_own_following(rank, world_size, spec):
    """Six steps of gradwire's DDP without a scale; and with one that doubles."""
    outcomes = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)):
        torch.manual_seed(0)
        ddp = gradwire.DistributedDataParallel(network(), **TINY_BUCKETS, compressor=spec, scaler=scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), RATE, momentum=0.9)
        own = scaler or torch.amp.GradScaler("cpu", enabled=False)
        for step in range(6):
            optimizer.zero_grad()
            own.scale(loss_of(ddp, batch((4, 12), rank, step))).backward()
            own.step(optimizer)
            own.update()
        outcomes.append([p.detach().clone() for p in ddp.parameters()])
        assert ddp.compression.scaler is scaler
        ddp.compression.close()
    return outcomes, own.get_scale()


@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "powersgd:rank=2"])
def test_gradwire_s_ddp_follows_the_scaler_that_it_was_made_with(ranks, spec):
    for (unscaled, followed), scale in ranks.run(train_own_following, 2, spec):
        assert scale == 8 * SCALE
        assert same(unscaled, followed)


def reads_of_steps(rank, world_size, way):
    """For each step, the times that the scale was read in forward and in backward."""
    model, reads = network(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.get_scale = lambda read=scaler.get_scale: reads.append(1) or read()
    if way == "own":
        model = gradwire.DistributedDataParallel(model, compressor="topk:ratio=0.1", scaler=scaler)
        handle = model.compression
    else:
        model = (
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
            if way == "fsdp"
            else DistributedDataParallel(model)
        )
        spec = {"reduce": "int8"} if way == "fsdp" else {"compressor": "topk:ratio=0.1"}
        handle = gradwire.attach(model, **spec, scaler=scaler)
    optimizer, found = torch.optim.SGD(model.parameters(), RATE), []
    scaler.scale(torch.ones(1))  # makes its tensor
    for step in range(3):
        reads.clear()
        loss = loss_of(model, batch((4, 12), rank, step))
        in_forward = len(reads)
        scaler.scale(loss).backward()
        found.append((in_forward, len(reads) - in_forward))
        scaler.step(optimizer)
        scaler.update()
    handle.close()
    return found


@pytest.mark.parametrize("way", ["attach", "own", pytest.param("fsdp", marks=fsdp_of_others)])
def test_the_scale_is_read_before_forward_and_never_in_backward_where_a_gpu_would_be_behind(ranks, way):
    assert ranks.run(reads_of_steps, 2, way) == [[(1, 0)] * 3] * 2


def follow_and_rescale(rank, world_size):
    _, handle, _ = attached("topk:ratio=0.1")
    handle.follow(torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match=r"leave rescale\(\) out"):
        handle.rescale(2.0)


def test_a_handle_that_follows_is_not_rescaled_twice(ranks):
    ranks.run(follow_and_rescale, 1)


def scale_of(scaler, scale):
    """Give the scaler a state, as a checkpoint does."""
    scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": 0})


def rolled_back(rank, world_size, kind, load):
    """Averages, in units of gradients, after a state of scale 2 was loaded into a handle that had trained under scale 16.

    And what they are without a scale.
    """
    found = []
    for scales in ((2.0, 16.0), (1.0, 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        scaler.scale(torch.zeros(()))  # makes its scale
        if kind == "own":
            model = gradwire.DistributedDataParallel(Given(SHAPES), compressor="topk:ratio=0.1", scaler=scaler)
            handle = model.compression
        else:
            model = DistributedDataParallel(Given(SHAPES))
            handle = gradwire.attach(model, "topk:ratio=0.1", scaler=scaler)

        def step_of(number, model=model, scaler=scaler):
            given = gradients(rank, number, SHAPES)
            means = average(model, [each * scaler.get_scale() for each in given])
            return {name: mean / scaler.get_scale() for name, mean in means.items()}

        step_of(0)
        before = {"this rank": handle.state_dict, "gathered": handle.gather_state_dict}[load]()
        scale_of(scaler, scales[1])
        step_of(1)
        step_of(2)
        {"this rank": handle.load_state_dict, "gathered": handle.scatter_state_dict}[load](before)
        scale_of(scaler, scales[0])
        found.append([step_of(number) for number in (3, 4)])
        handle.close()
    return found


@pytest.mark.parametrize("load", ["this rank", "gathered"])
@pytest.mark.parametrize("kind", ["own", "attached"])
def test_a_state_of_another_scale_than_the_handle_s_last_keeps_its_units(ranks, kind, load):
    for scaled, unscaled in ranks.run(rolled_back, 2, kind, load):
        assert alike(scaled, unscaled)
