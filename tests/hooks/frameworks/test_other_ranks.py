"""From a checkpoint of two ranks three go on, in each framework, and each is owed the mean of what those two held back."""

import pytest
import torch

from . import test_accelerate, test_lightning, test_transformers
from .launched import STEPS, TIMEOUT, launched, needing


def flushed(model, handle, loss):
    """All that is held back: the average of next to nothing once nothing compresses."""
    handle.swap("none")
    model.zero_grad()
    (1e-12 * loss(model)).backward()
    averages = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return averages


def by_accelerate(world_size, folder, resumed):
    accelerator, model, *others, handle = test_accelerate.prepared(world_size)
    if resumed:
        accelerator.load_state(folder)
    else:
        test_accelerate.epochs(accelerator, model, *others, STEPS)
        accelerator.save_state(folder)
    held = flushed(model, handle, lambda model: model(torch.ones(1, 64)).sum())
    handle.close()
    return held


def by_lightning(world_size, folder, resumed):
    from pytorch_lightning.callbacks import Callback

    held = []

    class AtEpochs(Callback):
        def on_train_epoch_start(self, trainer, _):
            if trainer.current_epoch == 1:
                strategy = trainer.strategy
                held.extend(flushed(strategy.model, strategy.compression, lambda model: model(torch.ones(1, 64)).sum()))

    checkpoint = f"{folder}/epoch=0.ckpt" if resumed else None
    test_lightning.trained(world_size, folder, checkpoint=checkpoint, callbacks=[AtEpochs()])
    return held


def by_transformers(world_size, folder, resumed):
    held = []

    def at_epochs(trainer, handle):
        if trainer.state.global_step == STEPS:
            inputs = {"inputs": torch.ones(1, 64), "labels": torch.ones(1, 8)}
            held.extend(flushed(trainer.model_wrapped, handle, lambda model: model(**inputs)["loss"]))

    checkpoint = f"{folder}/checkpoint-{STEPS}" if resumed else None
    _, handle, _ = test_transformers.trained(world_size, folder, checkpoint=checkpoint, at_epochs=at_epochs)
    handle.close()
    return held


def held_back(rank, world_size, train, folder, resumed):
    with launched(rank, world_size):
        return train(world_size, folder, resumed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        pytest.param(by_accelerate, marks=needing("accelerate")),
        pytest.param(by_lightning, marks=needing("pytorch_lightning")),
        pytest.param(by_transformers, marks=needing("transformers", "accelerate")),
    ],
)
def test_three_ranks_go_on_from_the_mean_of_what_two_held_back(ranks, tmp_path, train):
    saved, _ = ranks.run(held_back, 2, train, str(tmp_path), False, timeout=TIMEOUT)
    assert all(numbers.abs().max() > 0 for numbers in saved[::2])  # of weights
    for held in ranks.run(held_back, 3, train, str(tmp_path), True, timeout=TIMEOUT):
        torch.testing.assert_close(held, saved)
