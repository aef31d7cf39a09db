"""gradwire.accelerate on Hugging Face's Accelerate: accumulation, clipping, save_state and load_state."""

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gradwire

from ..test_handle import same
from .launched import (
    BATCH,
    SPEC,
    STEPS,
    TIMEOUT,
    as_it_is_and_compiled,
    data,
    dense_bytes,
    forget_accelerate,
    launched,
    needing,
    network,
    numbers,
)

ACCUMULATED = 3


def prepared(world_size, *, compiled=False, scaler=None):
    from accelerate import Accelerator

    backend = "eager" if compiled else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, dynamo_backend=backend)
    accelerator.scaler = scaler
    optimizer = torch.optim.SGD((model := network()).parameters(), 0.1, momentum=0.9)
    loader = DataLoader(data(world_size), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return accelerator, model, optimizer, loader, gradwire.accelerate(accelerator, model, SPEC)


def epochs(accelerator, model, optimizer, loader, count):
    """Each is one step of accumulated batches."""
    for _ in range(count):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()


def train(rank, world_size, folder, compiled):
    with launched(rank, world_size):
        *parts, handle = prepared(world_size, compiled=compiled)
        with pytest.raises(TypeError, match="accelerate launch"):
            gradwire.accelerate(parts[0], network(), SPEC)
        epochs(*parts, STEPS)
        parts[0].save_state(folder)
        epochs(*parts, STEPS)
        *others, again = prepared(world_size, compiled=compiled)
        others[0].load_state(folder)
        epochs(*others, STEPS)
        alike = same(numbers(parts[1]), numbers(others[1])) and same(handle.state_dict(), again.state_dict())
        stats = handle.stats()
        handle.close()
        again.close()
        forget_accelerate()
    return alike, numbers(parts[1]), stats.steps, stats.last.traffic.payload_bytes


@needing("accelerate")
@as_it_is_and_compiled
def test_accelerate_trains_compressed_and_resumes_in_the_same_bits(ranks, tmp_path, compiled):
    answers = ranks.run(train, 2, str(tmp_path), compiled, timeout=TIMEOUT)
    for alike, parameters, steps, payload in answers:
        assert alike
        assert same(parameters, answers[0][1])
        assert steps == 2 * STEPS
        assert 0 < payload < dense_bytes() / 5
