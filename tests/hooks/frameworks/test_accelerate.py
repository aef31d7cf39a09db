"""gradwire.accelerate on Hugging Face's Accelerate: accumulation, clipping, save_state and load_state."""

import gc
import os
import weakref

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gradwire

from ...forked import Script
from ..given import same
from .launched import BATCH, SPEC, STEPS, TIMEOUT, compiled_too, data, dense_bytes, launched, needing, network, numbers

ACCUMULATED = 3


def prepared(world_size, *, compiled=False, scaler=None):
    from accelerate import Accelerator

    backend = "eager" if compiled else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED, dynamo_backend=backend)
    accelerator.scaler = scaler
    parts = parts_of(accelerator, world_size)
    return accelerator, *parts, gradwire.accelerate(accelerator, parts[0], SPEC)


def parts_of(accelerator, world_size, momentum=0.9):
    """A prepared model, its optimizer and data."""
    optimizer = torch.optim.SGD((model := network()).parameters(), 0.1, momentum=momentum)
    return accelerator.prepare(model, optimizer, DataLoader(data(world_size), BATCH))


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
        with pytest.raises(TypeError, match=r"pass the model that accelerator.prepare\(\) returned"):
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
    return alike, numbers(parts[1]), stats.steps, stats.last.traffic.payload_bytes


@pytest.mark.slow
@needing("accelerate")
@compiled_too
def test_accelerate_trains_compressed_and_resumes_in_the_same_bits(ranks, tmp_path, compiled):
    answers = ranks.run(train, 2, str(tmp_path), compiled, timeout=TIMEOUT)
    for alike, parameters, steps, payload in answers:
        assert alike
        assert same(parameters, answers[0][1])
        assert steps == 2 * STEPS
        assert 0 < payload < dense_bytes() / 5


ALONE = """
import torch
from accelerate import Accelerator
import gradwire

accelerator = Accelerator(cpu=True)
gradwire.accelerate(accelerator, accelerator.prepare(torch.nn.Linear(4, 4)), "int8")
"""


@pytest.mark.slow
@needing("accelerate")
def test_one_process_of_accelerate_is_told_how_to_start_several():
    errors = Script(ALONE, variables={**os.environ, "HF_HUB_OFFLINE": "1"}).end().errors
    assert "TypeError: Accelerate runs as one process here" in errors
    assert "torchrun --nproc-per-node 2 script.py" in errors
    assert "accelerate launch --cpu starts one process" in errors


def by_kwargs(rank, world_size, folder):
    """Parameters and states after steps by the handler's hook, whole and resumed, and what others' steps give."""
    from accelerate import Accelerator

    with launched(rank, world_size):
        runs = []
        for resumed in (False, True):
            accelerator = Accelerator(cpu=True, kwargs_handlers=[gradwire.AccelerateKwargs(SPEC, bucket_cap_mb=1)])
            parts = parts_of(accelerator, world_size)
            handle = gradwire.accelerate(accelerator, parts[0])
            assert handle is gradwire.handle_of(parts[0])
            if resumed:
                accelerator.load_state(folder)
            else:
                epochs(accelerator, *parts, STEPS)
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
            epochs(accelerator, *parts, STEPS)
            runs.append((numbers(parts[0]), handle.state_dict()))
            steps, payload = handle.stats().steps, handle.stats().last.traffic.payload_bytes
            handle.close()
    return runs, steps, payload


@needing("accelerate")
def test_accelerate_s_handler_of_keywords_registers_the_hook(ranks, tmp_path):
    for (whole, resumed), steps, payload in ranks.run(by_kwargs, 2, str(tmp_path), timeout=TIMEOUT):
        assert same(whole, resumed)
        assert steps == 2 * 3 * STEPS  # an epoch has three
        assert 0 < payload < dense_bytes() / 5


def folds(rank, world_size, folder, free):
    """What is registered after each of three folds, each with handles of its own, which are in the last one's checkpoint.

    `free`: by `free_memory`, or else the handles are closed.
    """
    from accelerate import Accelerator

    counts, handles = [], []
    with launched(rank, world_size):
        accelerator = Accelerator(cpu=True)
        for _ in range(3):
            models = [accelerator.prepare(network()) for _ in range(2)]
            now = [gradwire.accelerate(accelerator, model, SPEC) for model in models]
            handles += [weakref.ref(handle) for handle in now]
            counts.append(len(accelerator._custom_objects))
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            accelerator.load_state(folder)
            accelerator.wait_for_everyone()
            if free:
                models = accelerator.free_memory(*models)
            else:
                for handle in now:
                    handle.close()
            del now
        gc.collect()
        living = sum(handle() is not None for handle in handles)
    return counts, living


@needing("accelerate")
@pytest.mark.parametrize("free", [True, False])
def test_folds_of_one_accelerator_leave_no_handles_behind(ranks, tmp_path, free):
    for counts, living in ranks.run(folds, 2, str(tmp_path), free, timeout=TIMEOUT):
        assert counts == [2, 2, 2]
        assert living <= 2 or not free  # of the last fold, whose handles the accelerator has; it has models not freed


def closed(rank, world_size, folder):
    """What a checkpoint holds of a closed handle; the steps of a new one that loads it, and of one that trained on."""
    with launched(rank, world_size):
        *parts, handle = prepared(world_size)
        epochs(*parts, 1)
        parts[0].save_state(f"{folder}/open")
        handle.close()
        parts[0].save_state(f"{folder}/closed")
        parts[0].wait_for_everyone()
        parts[0].load_state(f"{folder}/open")  # as for an evaluation of the best model
        saved = torch.load(f"{folder}/closed/custom_checkpoint_0.pkl", weights_only=True)
        *others, again = prepared(world_size)
        others[0].load_state(f"{folder}/closed")
        before = again.stats().steps
        epochs(*others, 1)
        steps = again.stats().steps
        again.close()
    return saved, before, steps


@needing("accelerate")
def test_a_checkpoint_has_no_state_of_a_closed_handle_and_loads(ranks, tmp_path):
    for saved, before, steps in ranks.run(closed, 2, str(tmp_path), timeout=TIMEOUT):
        assert saved == {"closed": True}
        assert (before, steps) == (0, 1)


def prepared_locally(rank, world_size, folder):
    """Parameters of a prepared model after local steps, and after going on from a checkpoint; steps and rounds."""
    from accelerate import Accelerator

    with launched(rank, world_size):
        found = []
        for resumed in (False, True):
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
            parts = parts_of(accelerator, world_size, momentum=0.0)
            options = {"every": 2, "fragments": 1, "compressor": "int8", "overlap": False}
            steps = gradwire.accelerate_locally(accelerator, *parts[:2], **options)
            if resumed:
                accelerator.load_state(folder)
            else:
                epochs(accelerator, *parts, 3)
                apart = numbers(parts[0])
                accelerator.save_state(folder)
                accelerator.wait_for_everyone()
            epochs(accelerator, *parts, 1)
            found.append((numbers(parts[0]), steps.steps, steps.round))
            steps.close()
        accelerator.save_state(f"{folder}/ended")
        accelerator.wait_for_everyone()
        saved = torch.load(f"{folder}/ended/custom_checkpoint_0.pkl", weights_only=True)
    return apart, found, saved


@needing("accelerate")
def test_a_prepared_model_trains_by_local_steps_and_goes_on_from_a_checkpoint(ranks, tmp_path):
    first, second = ranks.run(prepared_locally, 2, str(tmp_path), timeout=TIMEOUT)
    assert not same(first[0], second[0])  # gradients are not averaged
    assert "closed" not in first[2]  # what local SGD has at its end is saved
    for (parameters, *counts), (others, *counts_there) in zip(first[1], second[1], strict=True):
        assert same(parameters, others)  # after a round
        assert counts == counts_there == [4, 2]
