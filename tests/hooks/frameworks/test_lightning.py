"""GradwireStrategy in Lightning's Trainer: compressed, all ranks' states in its checkpoints, resumed in the same bits."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import gradwire

from ..given import same
from .launched import BATCH, SPEC, STEPS, TIMEOUT, compiled_too, data, dense_bytes, launched, needing, network, numbers


def trained(
    world_size, folder, compiled=False, manual=False, bare=False, unused=False, checkpoint=None, callbacks=(), **others
):
    """Two epochs of three steps, of two batches each; or `manual`, two batches of two steps each, of which one uses less."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.automatic_optimization = network(), not manual

        def forward(self, inputs):
            return self.network(inputs)

        def training_step(self, batch, _):
            inputs, targets = batch
            if not manual:
                return mse_loss(self.network(inputs), targets)
            for part in (
                lambda: self.network[0](inputs).square().mean(),
                lambda: mse_loss(self.network(inputs), targets),
            ):
                self.optimizers().zero_grad()
                part().backward() if bare else self.manual_backward(part())
                self.optimizers().step()
            return None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    options = {"find_unused_parameters": manual or unused, "cluster_environment": TorchElasticEnvironment()}
    if not compiled:  # torch's compiler refuses buckets that are smaller than the first one's 1 MB
        options["bucket_cap_mb"] = 0.004
    if "strategy" not in others:
        others["strategy"] = gradwire.lightning.GradwireStrategy(SPEC, **options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        max_epochs=1 if manual else 2,
        limit_train_batches=2 if manual else None,
        accumulate_grad_batches=1 if manual else 2,
        log_every_n_steps=1,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True), *callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **others,
    )
    model = Regression()
    fitted = torch.compile(model, backend="eager") if compiled else model
    trainer.fit(fitted, DataLoader(data(world_size), BATCH // 2), ckpt_path=checkpoint)
    return numbers(model), getattr(trainer.strategy, "compression", None), trainer


def train(rank, world_size, folder, compiled):
    with launched(rank, world_size):
        whole, handle, trainer = trained(world_size, folder, compiled=compiled)
        logged, steps = dict(trainer.logged_metrics), handle.stats().steps
        saved = torch.load(f"{folder}/epoch=0.ckpt", weights_only=False)["gradwire"]["ranks"]
        resumed, again, _ = trained(world_size, folder, compiled=compiled, checkpoint=f"{folder}/epoch=0.ckpt")
        by_hand, manual, _ = trained(world_size, folder, compiled=compiled, manual=True)
        from gradwire.hooks.frameworks.lightning import logs_now

        assert logs_now(trainer)  # with log_every_n_steps=1
        assert logs_now(SimpleNamespace())  # a Lightning that has another inside
    states = [state["rank"] for state in saved], saved[rank]["step"], handle.state_dict(), again.state_dict()
    return whole, resumed, by_hand, logged, (steps, manual.stats().steps), states


@needing("pytorch_lightning")
@compiled_too
def test_lightning_trains_compressed_and_resumes_in_the_same_bits(ranks, tmp_path, compiled):
    answers = ranks.run(train, 2, str(tmp_path), compiled, timeout=TIMEOUT)
    for whole, resumed, by_hand, logged, steps, (saved_ranks, saved_step, state, state_again) in answers:
        assert same(whole, answers[0][0])
        assert same(whole, resumed)
        assert same(by_hand, answers[0][2])
        assert steps == (2 * STEPS, 4)
        assert saved_ranks == [0, 1]
        assert saved_step == STEPS
        assert same(state, state_again)
        assert 0 < logged["gradwire/payload_bytes"] < dense_bytes() / 5


def closing(rank, world_size, folder):
    """What Lightning says when a fit is over whose graph never changed, and whether it could have said something."""
    said = []
    with launched(rank, world_size), mock.patch("pytorch_lightning.strategies.ddp.rank_zero_info", said.append):
        _, _, trainer = trained(world_size, folder, unused=True)
    return said, trainer.strategy.model is trainer.lightning_module


@needing("pytorch_lightning")
def test_lightning_advises_no_call_that_the_strategy_refuses(ranks, tmp_path):
    assert ranks.run(closing, 2, str(tmp_path), timeout=TIMEOUT) == [([], True)] * 2
