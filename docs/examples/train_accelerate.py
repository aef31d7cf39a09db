"""Accelerate with compressed gradients: torchrun --nproc-per-node 2 train_accelerate.py."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradwire

CHECKPOINTS = Path("accelerate-checkpoints")  # where all hosts can read and write

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
torch.manual_seed(0)
inputs = torch.randn(512, 64)
loader = DataLoader(TensorDataset(inputs, inputs[:, :8].argmax(1)), batch_size=16)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
handle = gradwire.accelerate(accelerator, model, "int4")  # after prepare()

if whole := sorted(CHECKPOINTS.glob("step-*")):
    accelerator.load_state(str(whole[-1]))  # what is held back, too

for _ in range(4):
    for batch, targets in loader:
        with accelerator.accumulate(model):  # gradients are averaged, compressed, with every second batch
            accelerator.backward(cross_entropy(model(batch), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

stats = handle.stats()
unfinished = CHECKPOINTS / "unfinished"
accelerator.save_state(str(unfinished))
accelerator.wait_for_everyone()  # all ranks have written their files
if accelerator.is_main_process:
    for path in unfinished.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # on disk before the folder gets its name
    unfinished.rename(CHECKPOINTS / f"step-{stats.steps:06}")  # a kill leaves this checkpoint whole, or the one before

accelerator.print(f"{stats.steps} synchronized steps, {stats.last.traffic.payload_bytes} payload bytes in the last one")
handle.close()
accelerator.end_training()
