"""Trials of FSDP2 with lossless communication: it trains as torch's own does."""

from dataclasses import dataclass
from random import Random

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gradwire

TIGHT, ROUGH = 1e-5, 4e-3  # what sums in another order, and 16 bits of torch's sums, may make


@dataclass(frozen=True)
class Trial:
    """`wrapped`: layers that are sharded by themselves; the root is always. `half`: None, bf16, or bf16 with its sums."""

    seed: int
    world_size: int
    replicas: int
    widths: tuple[int, ...]
    wrapped: tuple[int, ...]
    reshards: bool
    half: str | None
    optimizer: str
    micro_batches: tuple[int, ...]
    asked: dict[str, str]


def drawn(seed):
    """The trial of a seed."""
    source = Random(f"shards {seed}")
    world_size, replicas = source.choice(((2, 1), (2, 1), (3, 1), (4, 2)))
    widths = tuple(source.randint(1, 33) for _ in range(source.randint(2, 5)))
    layers = len(widths) - 1
    asked = {"gather": "none"} if source.random() < 0.5 else {}
    if source.random() < 0.3:
        asked["reduce"] = "none"
    if replicas > 1 and source.random() < 0.5:
        asked["replicas"] = "none"
    return Trial(
        seed,
        world_size,
        replicas,
        widths,
        tuple(sorted(source.sample(range(layers), source.randint(0, layers)))),
        source.random() < 0.6,
        source.choice((None, None, "bf16", "bf16 sums")),
        source.choice(("sgd", "adamw")),
        tuple(source.choice((1, 1, 2, 3)) for _ in range(source.randint(2, 5))),
        asked,
    )


def network(trial):
    """Linear layers of drawn widths, sharded as drawn."""
    with torch.random.fork_rng():
        torch.manual_seed(trial.seed)
        model = nn.Sequential(*(nn.Linear(*pair) for pair in zip(trial.widths, trial.widths[1:], strict=False)))
    options = {"reshard_after_forward": trial.reshards}
    if trial.half:
        sums = {} if trial.half == "bf16 sums" else {"reduce_dtype": torch.float32}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **sums)
    shape = (trial.replicas, trial.world_size // trial.replicas) if trial.replicas > 1 else (trial.world_size,)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for index in trial.wrapped:
        fully_shard(model[index], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def trained(trial, model, rank):
    """{name: whole parameter} after all steps."""
    kind = torch.optim.SGD if trial.optimizer == "sgd" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.02)
    for step, micro_batches in enumerate(trial.micro_batches):
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro_batch)
            inputs = torch.randn(4, trial.widths[0], generator=generator)
            model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def train(rank, world_size, trial):
    """Where torch's communication and ours make other parameters; in words."""
    with torch.backends.mkldnn.flags(enabled=False):  # which refuses bf16 on some processors
        theirs = trained(trial, network(trial), rank)
        model = network(trial)
        handle = gradwire.attach(model, **trial.asked)
        ours = trained(trial, model, rank)
    handle.close()
    tolerance = ROUGH if trial.half == "bf16 sums" else TIGHT
    off = {name: float((theirs[name] - numbers).abs().max()) for name, numbers in ours.items()}
    return ", ".join(f"{name} by {by:.2g}" for name, by in off.items() if not by <= tolerance)


def broken(trial, answers):
    """Sentences on all ranks that differ."""
    return [f"rank {rank}: not as torch: {answer}" for rank, answer in enumerate(answers) if answer]
