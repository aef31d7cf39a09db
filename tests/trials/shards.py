"""Trials of FSDP2: with lossless communication it trains as torch's own does, and with compression no gradient is lost."""

from dataclasses import dataclass, replace
from random import Random

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import _redistribute, debug

import gradwire

from ..hooks.fsdp.given import GivenParts, gradients

TIGHT, ROUGH = 1e-5, 4e-3  # what sums in another order, and 16 bits of torch's sums, may make
SUMS = ("none", "int8:error_feedback=true", "int4", "int4:residual_bits=8", "ternary")
AMONG_REPLICAS = (
    "topk:ratio=0.3",
    "onebit:block=8,error_feedback=1",
    "powersgd:rank=1",
    "int8:block=8,error_feedback=true",
    "topk:ratio=0.1,start_iter=2",
)


@dataclass(frozen=True)
class Trial:
    """`wrapped`: layers that are sharded by themselves; the root is always. `half`: None, bf16, or bf16 with its sums.

    `loses`: gradients are compressed; then they are given, and there is neither optimizer nor half.
    """

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
    loses: bool = False


def drawn(seed):
    trial, source = lossless(seed), Random(f"shards {seed} compressed")
    if source.random() < 0.5:
        return trial
    asked = {"gather": source.choice(("none", "int8")), "reduce": source.choice(SUMS[trial.replicas == 1 :])}
    if trial.replicas > 1:
        asked["replicas"] = source.choice(AMONG_REPLICAS)
    return replace(trial, asked=asked, loses=True)


def lossless(seed):
    """A trial whose communication loses nothing."""
    source = Random(f"shards {seed}")
    world_size, replicas = source.choice(((2, 1), (2, 1), (3, 1), (4, 2)))
    widths = [source.randint(1, 33) for _ in range(source.randint(2, 5))]
    layers = len(widths) - 1
    large = source.randrange(layers)  # of which each compressor holds something back
    widths[large : large + 2] = [max(8, width) for width in widths[large : large + 2]]
    asked = {"gather": "none"} if source.random() < 0.5 else {}
    if source.random() < 0.3:
        asked["reduce"] = "none"
    if replicas > 1 and source.random() < 0.5:
        asked["replicas"] = "none"
    asked = asked or {source.choice(("gather", "reduce")): "none"}
    wrapped, reshards = sorted(source.sample(range(layers), source.randint(0, layers))), source.random() < 0.6
    half, optimizer = source.choice((None, None, "bf16", "bf16 sums")), source.choice(("sgd", "adamw"))
    batches = tuple(source.choice((1, 1, 2, 3)) for _ in range(source.randint(3, 5)))
    widths, wrapped = tuple(widths), tuple(wrapped)
    return Trial(seed, world_size, replicas, widths, wrapped, reshards, half, optimizer, batches, asked)


def network(trial):
    with torch.random.fork_rng():
        torch.manual_seed(trial.seed)
        model = nn.Sequential(*(nn.Linear(*pair) for pair in zip(trial.widths, trial.widths[1:], strict=False)))
    return sharded(trial, model, [model[index] for index in trial.wrapped])


def sharded(trial, model, parts):
    """The model, and these parts of it by themselves, over shards and replicas."""
    options = {"reshard_after_forward": trial.reshards}
    if trial.half and not trial.loses:
        sums = {} if trial.half == "bf16 sums" else {"reduce_dtype": torch.float32}
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, **sums)
    shape = (trial.replicas, trial.world_size // trial.replicas) if trial.replicas > 1 else (trial.world_size,)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in parts:
        fully_shard(part, mesh=mesh, **options)
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


def account(trial, rank):
    """{name: (mean of what all ranks gave, sum of what came out and then was still held back)}, in float64.

    And whether anything was held back.
    """
    pairs = list(zip(trial.widths, trial.widths[1:], strict=False))
    shapes = [((outputs, inputs), (outputs,)) for inputs, outputs in pairs]
    model = GivenParts(shapes)
    handle = gradwire.attach(sharded(trial, model, model.parts), **trial.asked)
    given = [[torch.zeros(shape, dtype=torch.float64) for shape in part] for part in shapes]
    came, held = dict.fromkeys(dict(model.named_parameters()), 0.0), False
    for step, micro_batches in enumerate((*trial.micro_batches, 1)):
        flushes = step == len(trial.micro_batches)
        if flushes:
            handle.swap(reduce="none")
            if handle.replicas is not None:
                handle.replicas.swap("none")
        for micro_batch in range(micro_batches):
            model.set_requires_gradient_sync(micro_batch == micro_batches - 1)
            everyone_s = [gradients(each, 10 * step + micro_batch, shapes) for each in range(trial.world_size)]
            scale = 0.0 if flushes else 1.0
            model([[scale * numbers for numbers in part] for part in everyone_s[rank]]).backward()
            for total, *parts in zip(given, *everyone_s, strict=True):
                for place, numbers in enumerate(zip(*parts, strict=True)):
                    total[place] += scale * sum(each.double() for each in numbers) / trial.world_size
        for name, parameter in model.named_parameters():
            whole = parameter.grad.full_tensor().double()
            came[name], held = came[name] + whole, held or (flushes and bool(whole.any()))
        model.zero_grad()
    handle.close()
    due = [numbers for part in given for numbers in part]
    return {name: (mean, came[name]) for (name, _), mean in zip(model.named_parameters(), due, strict=True)}, held


def forget_meshes():
    """Empty torch's caches by meshes: one of a process group that has ended counts as the same as a new one."""
    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # not in older ones
    getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def train(rank, world_size, trial):
    """Where ours makes other parameters than torch's communication, or other sums than what ranks gave; in words."""
    forget_meshes()
    if trial.loses:
        narrow = "residual_bits" in trial.asked["reduce"]  # each step rounds what is held back
        (pairs, met), tolerance = account(trial, rank), (ROUGH if narrow else 10 * TIGHT) * len(trial.micro_batches)
    else:
        (pairs, met), tolerance = beside_torch(trial, rank), ROUGH if trial.half == "bf16 sums" else TIGHT
    off = {name: float((expected - numbers).abs().max()) for name, (expected, numbers) in pairs.items()}
    found = [f"{name} by {by:.2g}" for name, by in off.items() if not by <= tolerance]
    return ", ".join(found if met else [*found, "nothing was held back" if trial.loses else "gradwire sent nothing"])


def beside_torch(trial, rank):
    """{name: whole parameter as torch's communication makes it, and as ours does}, and whether ours sent anything."""
    with torch.backends.mkldnn.flags(enabled=False):  # which refuses bf16 on some processors
        theirs = trained(trial, network(trial), rank)
        model = network(trial)
        handle = gradwire.attach(model, **trial.asked)
        ours = trained(trial, model, rank)
    handles = [handle] if handle.replicas is None else [handle, handle.replicas]
    sent = sum(each.stats().total.traffic.payload_bytes for each in handles)
    handle.close()
    return {name: (theirs[name], numbers) for name, numbers in ours.items()}, sent > 0


def broken(trial, answers):
    words = "gradient was lost, or made up" if trial.loses else "not as torch"
    return [f"rank {rank}: {words}: {answer}" for rank, answer in enumerate(answers) if answer]
