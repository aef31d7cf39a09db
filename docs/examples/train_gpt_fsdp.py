"""Pretrains a small GPT on FSDP2 with bf16: torchrun --nproc-per-node 2 train_gpt_fsdp.py --compressor int8.

The baseline, `--compressor torch`, is FSDP2 with MixedPrecisionPolicy(param_dtype=torch.bfloat16) alone.
"""

import json
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_gpt import GPT, arguments, optimizers, train, validation_loss

import gradwire
from gradwire.experiments.workloads.data.text import text

args = arguments()
device = gradwire.init_process_group()  # NCCL if each rank has a GPU, else Gloo
rank, ranks = dist.get_rank(), dist.get_world_size()
data = text(args.text, args.context)
torch.manual_seed(args.seed)
model = GPT(args.context, args.width, args.layers, args.heads).to(device)
mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ranks",))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh, mp_policy=policy)
chosen = optimizers(model, args.optimizer, args.lr)
handle = None
if args.compressor != "torch":
    gather, _, reduce = args.compressor.partition("/")
    handle = gradwire.attach(model, gather=gather, reduce=reduce or gather, optimizer=chosen)  # the line to add

batches = data.train_batches(args.batch, seed=args.seed, rank=rank, world_size=ranks)
train(model, chosen, islice(batches, args.steps), device)
loss = validation_loss(model, data.evaluation_batches(16, 40), device)
if rank == 0:
    sent = round(handle.stats().last.traffic.sent_bytes) if handle else None
    print(
        json.dumps(
            {**vars(args), "text": str(args.text), "ranks": ranks, "validation_loss": loss, "sent_bytes_per_step": sent}
        )
    )
dist.destroy_process_group()
