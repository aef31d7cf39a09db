"""torch.amp.GradScaler above a hook: steps that overflow, and scales that change."""

import functools
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire

from .test_ddp_settings import network
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
