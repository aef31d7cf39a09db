"""What is said once: averages that are averaged again, losses with an averaged backward each, L-BFGS."""

import pytest
import torch

from ..ddp_core.errors import warned
from .test_starting_values import KINDS, loss_of, wrapped

STEPS = 6


def in_sync(model, optimizer, rank, step):
    """Two synchronized backwards, and one step."""
    for part in (0, 1):
        loss_of(model, rank, 2 * step + part).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_in_place(model, optimizer, rank, step):
    in_sync(model, optimizer, rank, step)
    optimizer.zero_grad(set_to_none=False)


def with_no_sync(model, optimizer, rank, step):
    with model.no_sync():
        loss_of(model, rank, 2 * step).backward()
    loss_of(model, rank, 2 * step + 1).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=bool(step % 2))


def both(model, optimizer, rank, step):
    """An average first, and in later steps none: what is said comes of the first backward that is added to one."""
    (in_sync if step == 2 else with_no_sync)(model, optimizer, rank, step)


def plainly(model, optimizer, rank, step):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def for_each_loss(model, optimizer, rank, step):
    """An averaged backward for each of two losses, whose gradients are kept apart until the step."""
    parts = []
    for part in (0, 1):
        optimizer.zero_grad()
        loss_of(model, rank, 2 * step + part).backward()
        parts.append([parameter.grad.clone() for parameter in model.parameters()])
    for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
        parameter.grad = sum(gradients)
    optimizer.step()
    optimizer.zero_grad()


def line_search(model, optimizer, rank, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    optimizer.step(closure)


def said(rank, world_size, kind, act, spec="int4:error_feedback=true", made=torch.optim.SGD):
    """The warnings of gradwire in some steps."""
    model, handle = wrapped(kind, spec)
    optimizer = made(model.parameters(), 0.1)
    with warned() as texts:
        for step in range(STEPS):
            act(model, optimizer, rank, step)
    handle.close()
    return [text for text in texts if "averaged" in text or "L-BFGS" in text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_that_adds_to_an_average_is_told_once(ranks, kind):
    for act in (in_sync, zeroed_in_place, both):
        (text,), others = ranks.run(said, 2, kind, act)
        assert "averaged again" in text
        assert "no_sync()" in text
        assert others == []


@pytest.mark.parametrize("kind", KINDS)
def test_accumulating_in_no_sync_is_not(ranks, kind):
    for act in (with_no_sync, plainly):
        assert ranks.run(said, 2, kind, act) == [[], []]


def test_where_an_average_of_averages_is_right_nothing_is_said(ranks):
    assert ranks.run(said, 2, "attached", in_sync, spec="none") == [[], []]


@pytest.mark.parametrize("kind", KINDS)
def test_losses_with_an_averaged_backward_each_are_told_of_compressors_without_error_feedback(ranks, kind):
    for texts in ranks.run(said, 2, kind, for_each_loss):
        (text,) = texts
        assert "error_feedback=false" in text
        assert "int8" in text


@pytest.mark.parametrize("kind", KINDS)
def test_lbfgs_is_told_once_that_it_ends_worse(ranks, kind):
    for texts in ranks.run(said, 2, kind, line_search, made=torch.optim.LBFGS):
        (text,) = texts
        assert "L-BFGS" in text
        assert "uncompressed" in text
