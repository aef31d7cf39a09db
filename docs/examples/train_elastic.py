"""Goes on after ranks have died: torchrun --standalone --nproc-per-node 2 --max-restarts 3 train_elastic.py."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS, CHECKPOINT = 32, Path("elastic-checkpoint.pt")  # where all hosts can read it

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
handle = gradwire.attach(model, "topk:ratio=0.05")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0

if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.scatter_state_dict(saved["compression"])  # to each rank its own; to another number of ranks the mean
    first = saved["step"]

for step in range(first, STEPS):
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))
    optimizer.zero_grad()
    cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
    optimizer.step()
    if (step + 1) % 8 == 0:
        compression = handle.gather_state_dict()  # on all ranks; the first one gets it
        if dist.get_rank() == 0:
            parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            with open("unfinished.pt", "wb") as file:
                torch.save({"step": step + 1, **parts, "compression": compression}, file)
                file.flush()
                os.fsync(file.fileno())  # on disk before it gets its name
            os.replace("unfinished.pt", CHECKPOINT)  # a kill leaves this checkpoint whole, or the one before

if dist.get_rank() == 0 and first >= STEPS:
    print(f"already finished: delete {CHECKPOINT} to start over")
elif dist.get_rank() == 0:
    print(f"{STEPS} steps, of which {STEPS - first} in this life, on {dist.get_world_size()} ranks")
handle.close()
dist.destroy_process_group()
