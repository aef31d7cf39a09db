"""A digest of the parameters after short trainings, for each compressor and wrapper: what a change of form must not change.

    torchrun --nproc-per-node 4 docs/benchmarks/same_bits.py before.json    # in one tree
    torchrun --nproc-per-node 4 docs/benchmarks/same_bits.py after.json     # in the other; then diff before.json after.json

Four ranks on CPUs train a small model by `DistributedDataParallel` of gradwire, by `attach` on torch's, by FSDP2 and by
LocalSteps. It uses torch and public names of gradwire alone, so that it runs in older trees, too. What a tree refuses is in
its file as an error.
"""

import hashlib
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from driver import parser_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

import gradwire

TOKENS, STEPS, BUCKET_MB, SEED = 50, 8, 0.01, 3
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, 0.01),
    "sgd": lambda parameters: SGD(parameters, 0.05, momentum=0.9),
}
OPTIONS = ["int4:error_feedback=true", "int4:rotate=true", "int8:rounding=stochastic", "int4:start_iter=2,warmup=int8"]
OPTIONS += ["int8:momentum=0.9", "powersgd:rank=2,payload=int4", "hosts:ranks=2+int4", "hosts:ranks=2+powersgd:rank=2"]
SHARDS = [("bf16", "bf16"), ("int8", "int8"), ("int8", "int4"), ("none", "int4"), ("hosts:ranks=2+int8",) * 2]


class Model(nn.Module):
    """An embedding, a block and a head: matrices, vectors, and buckets of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(TOKENS, 32), nn.LayerNorm(32)
        self.first, self.second, self.head = nn.Linear(32, 72), nn.Linear(72, 32), nn.Linear(32, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits: (sequences, positions, TOKENS)."""
        hidden = self.tokens(tokens)
        return self.head(hidden + self.second(self.first(self.norm(hidden)).relu()))


def train(model: nn.Module, optimizer: Optimizer, steps: int = STEPS) -> None:
    """Train on random tokens of this rank."""
    drawn = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(steps):
        inputs, targets = torch.randint(TOKENS, (2, 6, 9), generator=drawn)
        cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def own(model: nn.Module, optimizer: Optimizer, spec: str) -> None:
    """Train by gradwire's DistributedDataParallel."""
    train(
        gradwire.DistributedDataParallel(model, compressor=spec, optimizer=optimizer, bucket_cap_mb=BUCKET_MB),
        optimizer,
    )


def attached(model: nn.Module, optimizer: Optimizer, spec: str) -> None:
    """Train by torch's."""
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    gradwire.attach(wrapped, spec, optimizer=optimizer)
    train(wrapped, optimizer)


def local(model: nn.Module, optimizer: Optimizer, spec: str) -> None:
    """Train by local SGD."""
    gradwire.LocalSteps(model, optimizer, every=4, compressor=spec, fragments=2)
    train(model, optimizer, 2 * STEPS)


def shards(gather: str, reduce: str) -> nn.Module:
    """Train by FSDP2. Return the model."""
    model = fresh()
    for each in (model.first, model.second, model):
        fully_shard(each)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    gradwire.attach(model, gather=gather, reduce=reduce, optimizer=optimizer)
    train(model, optimizer)
    return model


def fresh() -> nn.Module:
    """Return the model that all trainings begin with."""
    torch.manual_seed(SEED)
    return Model()


def digest(training: Callable[[], nn.Module]) -> str:
    """Return a digest of the bits of all parameters after a training, or the error that refused it."""
    try:
        model = training()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole: Any = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(whole.detach().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def plain(wrapper: Callable[..., None], kind: str, spec: str) -> nn.Module:
    """Train by a wrapper of whole models. Return the model."""
    model = fresh()
    wrapper(model, OPTIMIZERS[kind](model.parameters()), spec)
    return model


def main() -> None:
    """Train all, and write the file."""
    parser = parser_of(__doc__)
    parser.add_argument("file", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    specs = [*gradwire.compressors(), *OPTIONS]
    found = {}
    for wrapper, kind, spec in product((own, attached, local), OPTIMIZERS, specs):
        found[f"{wrapper.__name__}, {kind}, {spec}"] = digest(lambda: plain(wrapper, kind, spec))  # noqa: B023 called at once
    for gather, reduce in SHARDS:
        found[f"FSDP2, {gather}, {reduce}"] = digest(lambda: shards(gather, reduce))  # noqa: B023 called at once
    if dist.get_rank() == 0:
        asked.file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    dist.barrier()
    os._exit(0)  # Gloo's threads may abort an interpreter that ends


if __name__ == "__main__":
    main()
