"""Trains with Muon in bf16, on shards or on replicas: torchrun --nproc-per-node 2 train_muon.py."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import gradwire

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--replicate", action="store_true", help="each rank has the whole model, so Muon's step sends nothing"
)
parser.add_argument("--compressor", default=os.environ.get("GRADWIRE_COMPRESSOR", "int8"))
parser.add_argument("--steps", type=int, default=32)
arguments = parser.parse_args()

device = gradwire.init_process_group()  # NCCL if each rank has a GPU, else Gloo
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
for module in (model[0], model[2], model[4], model):  # one call per block
    (replicate if arguments.replicate else fully_shard)(module, mesh=mesh, mp_policy=policy)

muon = torch.optim.Muon([model[2].weight], lr=0.02)  # in a GPT: the matrices of the blocks
adamw = torch.optim.AdamW([each for each in model.parameters() if each is not model[2].weight], lr=1e-3)
optimizers = [muon, adamw]
handle = None
if arguments.compressor != "torch":  # which gradwire try compares with
    both = {"gather": arguments.compressor, "reduce": arguments.compressor}
    one = {"compressor": arguments.compressor}
    handle = gradwire.attach(model, **(one if arguments.replicate else both), optimizer=optimizers)
    handle.watch(every=8)

for step in range(arguments.steps):
    random = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(32, 64, generator=random).to(device)
    loss = cross_entropy(model(inputs), inputs[:, :8].argmax(1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clips the averages
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    gradwire.report_loss(loss, handle)  # for gradwire try

ratio = handle.metrics().get("ratio", 1) if handle else 1  # nothing is sent on one rank
if dist.get_rank() == 0:
    print(f"{arguments.steps} steps, loss {loss.item():.2f}, {ratio:.1f}x fewer bytes than 16 bits")
if handle:
    handle.close()
dist.destroy_process_group()
