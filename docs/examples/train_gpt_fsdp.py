"""Pretrains a small GPT on FSDP2 with bf16: torchrun --nproc-per-node 2 train_gpt_fsdp.py --compressor int8.

The baseline, `--compressor torch`, is FSDP2 with MixedPrecisionPolicy(param_dtype=torch.bfloat16) alone.
"""

from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from train_gpt import GPT, arguments, optimizers, report, train, validation_loss

import gradwire
from gradwire.experiments.workloads.data.text import text

args = arguments()
device = gradwire.init_process_group()  # NCCL if each rank has a GPU, else Gloo
data = text(args.text, args.context)
torch.manual_seed(args.seed)
model = GPT(args.context, args.width, args.layers, args.heads).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for module in (*model.blocks, model):
    fully_shard(module, mesh=mesh, mp_policy=policy)
chosen = optimizers(model, args.optimizer, args.lr)
handle = None
if args.compressor != "torch":
    gather, _, reduce = args.compressor.partition("/")
    handle = gradwire.attach(model, gather=gather, reduce=reduce or gather, optimizer=chosen)  # the line to add

batches = data.train_batches(args.batch, seed=args.seed, rank=dist.get_rank(), world_size=dist.get_world_size())
train(model, chosen, islice(batches, args.steps), device)
loss = validation_loss(model, data.evaluation_batches(16, 40), device)
report(args, loss, handle.stats().last.traffic.sent_bytes if handle else None)
dist.destroy_process_group()
