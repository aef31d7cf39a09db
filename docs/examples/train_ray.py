"""Ray Train with compressed gradients, which survives a killed rank: python train_ray.py."""

import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy

import gradwire

STEPS = 32


def train() -> None:
    """Train as one rank: Ray has made the process group, and calls this function on each rank."""
    device, rank = get_device(), ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))  # torch's DDP around it
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = gradwire.attach(model, "int4", optimizer=optimizer)  # gradwire: the line to add
    first = 0
    if saved := ray.train.get_checkpoint():  # after a failure
        with saved.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), map_location=device, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.scatter_state_dict(state["compression"])  # gradwire: all ranks call it
        first = state["step"]

    for step in range(first, STEPS):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * rank + step)).to(device)
        optimizer.zero_grad()
        cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()
        if (step + 1) % 8 == 0:
            compression, checkpoint = handle.gather_state_dict(), None  # gradwire: all ranks call it
            if rank == 0:
                folder = tempfile.mkdtemp()
                parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({"step": step + 1, **parts, "compression": compression}, Path(folder, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            metrics = handle.metrics()
            ray.train.report({name: metrics[name] for name in ("steps", "ranks", "ratio")}, checkpoint=checkpoint)
    handle.close()


cuda = torch.cuda.device_count() >= 2
trainer = TorchTrainer(
    train,
    torch_config=TorchConfig(backend="nccl" if cuda else "gloo"),
    scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=cuda),
    run_config=ray.train.RunConfig(
        storage_path=tempfile.mkdtemp(),  # on several hosts: a folder that all can write to
        failure_config=ray.train.FailureConfig(max_failures=3),
    ),
)
found = trainer.fit().metrics
print(f"{found['steps']} steps on {found['ranks']} ranks, {found['ratio']:.1f}x fewer bytes")
