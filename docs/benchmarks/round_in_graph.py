"""A compressor's round inside the compiled graph, to measure against gradwire's hook: a prototype, and no part of gradwire.

It is what step_time.py builds for graph:SPECIFICATION, of none, bf16 and int8:error_feedback=false. The gradients of a
block take one round, of torch's functional collectives, with gradwire's kernels for int8 as operators of torch. So the
compiler has forward, backward and all rounds in two graphs without a break, and orders them.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.func import functional_call

from gradwire.compress.algorithms.quantized import Int8

CODEC = Int8()


@torch.library.custom_op("round_in_graph::encode", mutates_args=())
def encode(flat: Tensor, parts: int, length: int) -> Tensor:
    """Codes and scales of a flat tensor, cut into parts of a length: a row of bytes for each."""
    rows = torch.zeros(parts, CODEC.row_bytes(length), dtype=torch.uint8)
    CODEC.encode(flat, None, rows, length)
    return rows


@encode.register_fake
def _(flat: Tensor, parts: int, length: int) -> Tensor:
    return flat.new_empty(parts, CODEC.row_bytes(length), dtype=torch.uint8)


@torch.library.custom_op("round_in_graph::decode", mutates_args=())
def decode(rows: Tensor, numel: int, length: int) -> Tensor:
    """The mean over voters of what their rows say; `rows`: (voters, parts, bytes)."""
    mean = torch.empty(numel)
    CODEC.decode(rows, mean, length)
    return mean


@decode.register_fake
def _(rows: Tensor, numel: int, length: int) -> Tensor:
    return rows.new_empty(numel, dtype=torch.float32)


def averaged(flat: Tensor, spec: str, group: str, rank: int, ranks: int) -> Tensor:
    """The mean over ranks of a flat gradient, as the compressor has it."""
    if spec == "none":
        return collectives.all_reduce(flat, "sum", group) / ranks
    if spec == "bf16":
        return collectives.all_reduce(flat.bfloat16(), "sum", group).float() / ranks
    length = CODEC.row_length(-(-flat.numel() // ranks))
    served = min(length, flat.numel() - rank * length)  # elements of which this rank makes the mean for all
    votes = collectives.all_to_all_single(encode(flat, ranks, length), None, None, group)
    mean = encode(decode(votes.unsqueeze(1), served, length), 1, length)
    return decode(collectives.all_gather_tensor(mean, 0, group).unsqueeze(0), flat.numel(), length)


class Averaged(torch.autograd.Function):
    """Parameters as they are, whose gradients are averaged together."""

    @staticmethod
    def forward(ctx: Any, spec: str, group: str, rank: int, ranks: int, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return the same parameters."""
        ctx.of_ranks = spec, group, rank, ranks
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Average over ranks."""
        mean = averaged(torch.cat([each.reshape(-1) for each in gradients]), *ctx.of_ranks)
        parts = mean.split([each.numel() for each in gradients])
        return None, None, None, None, *(part.view_as(each) for part, each in zip(parts, gradients, strict=True))


class InGraph(nn.Module):
    """A model with the gradients of each block, and of the rest, averaged in its own graph."""

    def __init__(self, model: nn.Module, spec: str) -> None:
        super().__init__()
        spec = spec.removesuffix(":error_feedback=false")
        if spec not in ("none", "bf16", "int8"):
            raise ValueError(f"graph: takes none, bf16 or int8:error_feedback=false, got {spec}")
        blocks = [name for name, each in model.named_modules() if isinstance(each, nn.TransformerEncoderLayer)]
        parts: dict[str, list[str]] = {}
        for name, _ in model.named_parameters():
            parts.setdefault(next((block for block in blocks if name.startswith(f"{block}.")), ""), []).append(name)
        self.model, self.parts = model, list(parts.values())
        assert dist.group.WORLD is not None
        self.of_ranks = spec, dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size()

    def forward(self, inputs: Tensor) -> Tensor:
        """Call the model with parameters whose gradients will be averages."""
        parameters = dict(self.model.named_parameters())
        for names in self.parts:
            taken = Averaged.apply(*self.of_ranks, *(parameters[name] for name in names))
            parameters.update(zip(names, taken, strict=True))
        return functional_call(self.model, parameters, (inputs,))
