"""Frameworks know the optimizer: the compressor is that of `attach(..., optimizer=)`, without a word of the user's."""

import pytest
import torch
from torch.nn.functional import mse_loss

import gradwire

from .launched import QUIET, TIMEOUT, launched, needing, network

WITH_ADAM = "int4:error_feedback=false"


def adamw(model):
    return torch.optim.AdamW(model.parameters())


def by_trainer(folder):
    from gradwire.transformers import GradwireCallback

    from .test_transformers import trainer_of

    trainer, callback = trainer_of(2, folder, callback=lambda each: GradwireCallback(each, "int4"), max_steps=1)
    trainer.train()
    return callback.compression


def by_accelerate(folder):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    other = accelerator.prepare(torch.optim.SGD(network().parameters(), 0.1))  # of another model
    assert other is not None
    model = network()
    model, _ = accelerator.prepare(model, adamw(model))
    return gradwire.accelerate(accelerator, model, "int4")


def by_strategy(folder):
    import pytorch_lightning as pl
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    from gradwire.lightning import GradwireStrategy

    class Regression(pl.LightningModule):
        made = 0

        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, _):
            return mse_loss(self.network(batch), torch.zeros(2, 8))

        def configure_optimizers(self):
            self.made += 1
            return adamw(self)

    model, strategy = Regression(), GradwireStrategy("int4", cluster_environment=TorchElasticEnvironment())
    options = {"enable_checkpointing": False, **QUIET}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=1, **options)
    for fits in (1, 2):  # each makes optimizers of its own, once
        trainer.fit_loop.epoch_loop.max_steps = fits
        trainer.fit(model, torch.utils.data.DataLoader(torch.ones(8, 64), 2))
        assert model.made == fits
        assert trainer.optimizers == trainer.strategy.optimizers
    return strategy.compression


def by_fabric(folder):
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    from gradwire.lightning import GradwireFabricStrategy

    strategy = GradwireFabricStrategy("int4", cluster_environment=TorchElasticEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = network()
    model, _ = fabric.setup(model, adamw(model))
    return gradwire.handle_of(model)


def suits_adam(rank, world_size, by, folder):
    """Whether a framework makes of "int4" what suits AdamW."""
    with launched(rank, world_size):
        handle = by(folder)
        found = handle.compressor == gradwire.compressor(WITH_ADAM)
        handle.close()
    return found


@pytest.mark.parametrize(
    "by",
    [
        pytest.param(by_trainer, marks=needing("transformers", "accelerate")),
        pytest.param(by_accelerate, marks=needing("accelerate")),
        pytest.param(by_strategy, marks=needing("pytorch_lightning")),
        pytest.param(by_fabric, marks=needing("lightning_fabric")),
    ],
)
def test_the_optimizer_is_handed_on(ranks, tmp_path, by):
    assert ranks.run(suits_adam, 2, by, str(tmp_path), timeout=TIMEOUT) == [True, True]
