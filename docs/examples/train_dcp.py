"""Goes on from torch.distributed.checkpoint, with more ranks or fewer: torchrun --nproc-per-node 2 train_dcp.py."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradwire

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 32
CHECKPOINTS = Path("dcp-checkpoints")  # where all hosts can read and write


class Training:
    """Model, optimizer and the number of steps, as torch.distributed.checkpoint takes them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.step = saved["step"]


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
handle = gradwire.attach(model, "int4")
training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
parts = {"training": training, "compression": gradwire.GatheredState(handle)}

whole = sorted(CHECKPOINTS.glob("*/.metadata"))  # written last
if whole:
    dcp.load(parts, checkpoint_id=whole[-1].parent)  # what is held back, too: on other ranks its mean
first = training.step

while training.step < STEPS:
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + training.step))
    training.optimizer.zero_grad()
    cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
    training.optimizer.step()
    training.step += 1
    if training.step % 8 == 0:
        dcp.save(parts, checkpoint_id=CHECKPOINTS / f"{training.step:06}")  # on all ranks

if dist.get_rank() == 0 and first >= STEPS:
    print(f"already finished: delete {CHECKPOINTS} to start over")
elif dist.get_rank() == 0:
    print(f"{STEPS} steps, of which {STEPS - first} in this life, on {dist.get_world_size()} ranks")
handle.close()
dist.destroy_process_group()
