"""Resumes FSDP2 with Muon and AdamW to the bit: torchrun --nproc-per-node 2 train_dcp_fsdp.py."""

# With --replicate (torch 2.10 or later) each rank has the whole model: if it fits, Muon then sends nothing.

import argparse
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import gradwire

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=32)
parser.add_argument("--replicate", action="store_true")
OPTIONS = parser.parse_args()
COMPRESSOR = os.environ.get("GRADWIRE_COMPRESSOR", "int8")
CHECKPOINTS = Path("dcp-replicate" if OPTIONS.replicate else "dcp-fsdp")  # where all hosts can read and write

device = gradwire.init_process_group()  # NCCL if each rank has a GPU, else Gloo
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for module in (model[0], model[2], model):
    if OPTIONS.replicate:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(module, mesh=mesh)
    else:
        fully_shard(module, mesh=mesh)
muon = torch.optim.Muon([each for each in model.parameters() if each.ndim == 2], lr=0.02)
adamw = torch.optim.AdamW([each for each in model.parameters() if each.ndim != 2], lr=1e-3)
optimizers = [muon, adamw]
line = {"compressor": COMPRESSOR} if OPTIONS.replicate else {"gather": "int8", "reduce": COMPRESSOR}
handle = gradwire.attach(model, **line, optimizer=optimizers)
step = 0


def state() -> dict[str, Any]:
    """Return all that a resume needs. A collective call."""
    weights, moments = get_state_dict(model, optimizers)
    compression = gradwire.GatheredState(handle) if OPTIONS.replicate else handle.state_dict()
    return {"model": weights, "optimizers": moments, "step": step, "compression": compression}


whole = sorted(CHECKPOINTS.glob("*/.metadata"))  # written last
if whole:
    saved = state()  # dcp.load fills in what is there
    dcp.load(saved, checkpoint_id=whole[-1].parent)
    set_state_dict(model, optimizers, model_state_dict=saved["model"], optim_state_dict=saved["optimizers"])
    if not OPTIONS.replicate:  # dcp.load has loaded a GatheredState
        handle.load_state_dict(saved["compression"])
    step = saved["step"]
first = step

while step < OPTIONS.steps:
    random = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(32, 64, generator=random).to(device)
    cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    step += 1
    if step % 8 == 0:
        dcp.save(state(), checkpoint_id=CHECKPOINTS / f"{step:06}")  # on all ranks

digest = sha256()
for parameter in model.parameters():
    digest.update(parameter.full_tensor().detach().cpu().numpy().tobytes())  # type: ignore[attr-defined]
if dist.get_rank() == 0 and first >= OPTIONS.steps:
    print(f"already finished: delete {CHECKPOINTS} to start over")
elif dist.get_rank() == 0:
    print(f"{OPTIONS.steps} steps, of which {OPTIONS.steps - first} in this life; parameters {digest.hexdigest()[:12]}")
handle.close()
dist.destroy_process_group()
