"""Lightning with compressed gradients, on two processes of this machine: python train_lightning.py."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradwire.lightning import GradwireStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def main() -> None:
    pl.seed_everything(0)
    inputs = torch.randn(512, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :8].argmax(1)), batch_size=32)
    trainer = pl.Trainer(
        strategy=GradwireStrategy("int4"),  # in place of "ddp"
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint("lightning-checkpoints", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), data, ckpt_path="last")  # goes on from the last checkpoint, if there is one
    if trainer.is_global_zero:
        stats = trainer.strategy.compression.stats()
        print(f"{stats.steps} synchronized steps, {stats.last.traffic.payload_bytes} payload bytes in the last one")


if __name__ == "__main__":
    main()
