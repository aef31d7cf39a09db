"""The step of a DDP model on GPUs that nobody has measured, predicted for `gradwire plan` and the decision table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from ..compress import Ranks, compressor
from ..compress.protocol.card_traffic import through_card
from ..compress.state.shares import ranks_seen
from ..ddp_core.measure.step_model import LinkCost
from .advice.arithmetic import Arithmetic
from .advice.network import Kind, KindCost
from .advice.predict import Measured, Prediction, predicted, requests_on
from .advice.shared_cores import Work
from .advice.timed_training import Computation
from .bucket_plan import bucket_layouts

BACKWARD = 2 / 3  # of a step's computation: an assumption, twice as many multiplications as in forward
WIDTHS = 128  # elements
GOODPUT = 1448 / 1538  # bytes of payload in those that an Ethernet frame of 1,500 bytes takes, with TCP
COPY = {"H200": 4.13e12, "H100": 2.96e12, "A40": 0.696e12}  # bytes a second; measured, but for A40, which is published
PER_HOST, HEAD_DIMENSION = "hosts+", 64


@dataclass(frozen=True)
class Cost:
    """Cost of a compressor on an H200. `encode`: seconds a parameter; `launches`: seconds of the host a bucket.

    `beside`: it computes beside the training, on a processor of its own, and not on the GPU.
    """

    encode: float
    launches: float = 0.0
    beside: bool = False


COSTS = {  # docs/benchmarks/h200: step-gpu.json and step-host.json, against torch's DDP without compression
    "none": Cost(0.0, 0.12e-3),
    "bf16": Cost(2.6e-12, 0.39e-3),
    "int8": Cost(22.7e-12, 1.39e-3),  # with error feedback: without it is cheaper, and was not measured
    "int4": Cost(19.4e-12, 1.28e-3),
    "int4:error_feedback=false": Cost(14.5e-12, 1.03e-3),
    "powersgd": Cost(9.1e-12, 1.60e-3),
    "topk": Cost(15.8e-12, 1.08e-3),
    "onebit": Cost(45.1e-12, 2.10e-3),
}
DEAREST = COSTS["onebit"]  # for a compressor that was not measured


@dataclass(frozen=True)
class Cluster:
    """Hosts with GPUs. `card`: bytes a second of a host's network card, with headers. `bus`: those that each GPU sends to
    others of its host, while all do. `rings`: NCCL takes rings for all-reduces, else trees, which send less through a card.
    """

    hosts: int
    gpus_per_host: int
    card: float
    bus: float = float("inf")
    gpu: str = "H100"
    rings: bool = False

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.gpus_per_host < 1 or not (self.card > 0 and self.bus > 0):
            raise ValueError(f"a cluster has hosts, GPUs, and rates above 0; got {self}")
        if self.gpu not in COPY:
            raise ValueError(f"the speed of these GPUs' memory is known: {', '.join(COPY)}; got {self.gpu!r}")

    @property
    def ranks(self) -> Ranks:
        """The ranks, one for each GPU."""
        return Ranks(self.hosts * self.gpus_per_host, 0, self.gpus_per_host)

    def seconds_a_byte(self, kind: Kind) -> float:
        """Return the seconds of a collective for each byte that a rank sends."""
        form, _, scope = kind
        return max(through_card(form, scope, self.ranks, rings=self.rings) / (GOODPUT * self.card), 1 / self.bus)


@dataclass(frozen=True)
class GpuStep:
    """The computation of a step. `gradients`: parameters by name, as backward makes them ready, with the dtype that is sent.

    `ready`: of each the part of backward until it is there. `computation`, `backward`: seconds of a micro-batch; backward is
    assumed to be two thirds if nobody measured it. Only the last of the micro-batches communicates. `launches`: seconds of
    the host to launch a micro-batch.
    """

    gradients: Mapping[str, Tensor]
    ready: Mapping[str, float]
    computation: float
    backward: float | None = None
    micro_batches: int = 1
    launches: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.computation < float("inf") or self.micro_batches < 1:
            raise ValueError(
                "a step computes for some seconds above 0, in one micro-batch or more; got "
                f"{self.computation} s and {self.micro_batches}"
            )
        if self.backward is not None and not 0 <= self.backward <= self.computation:
            raise ValueError(f"backward is a part of {self.computation} s of computation, got {self.backward} s")

    def timed(self) -> Computation:
        """Return the computation from the beginning of the last micro-batch's backward to that of the next step's."""
        backward = BACKWARD * self.computation if self.backward is None else self.backward
        others = Work(self.micro_batches * self.computation - backward, 1.0)
        ready = {name: self.ready[name] * backward for name in self.gradients}
        return Computation(others, Work(backward, 1.0), Work(0.0), ready, dict.fromkeys(ready, 0.0))


def predicted_step(
    step: GpuStep, cluster: Cluster, spec: str, bucket_mb: float | None = None, cost: Cost | None = None
) -> Prediction:
    """Predict a step on a cluster with a compressor after its warm-up, in the order of backward.

    Args:
        step: the gradients and the computation.
        cluster: the hosts.
        spec: the compressor.
        bucket_mb: DDP's bucket size in MiB.
        cost: of the compressor, if it was measured; by default that of `COSTS`, scaled to the GPU's memory.

    Returns:
        The prediction. It leaves out latency, and takes all ranks as equally fast.
    """
    built = compressor(spec)
    layouts = bucket_layouts(step.gradients, bucket_mb, ranks_seen(built, cluster.ranks))
    requests = [requests_on(spec, layout) for layout in layouts]
    kinds = {each.kind for each in chain(*requests)}
    costs = {kind: KindCost(LinkCost(0.0, cluster.seconds_a_byte(kind)), 0.0) for kind in kinds}
    phases, cost = 1 + max(map(len, requests)), cost or cost_of(spec, cluster)
    arithmetic = {spec: Arithmetic((cost.encode / phases,) * phases, 0.0 if cost.beside else 1.0, cost.launches)}
    parts = Measured(
        step.timed(),
        step.gradients,
        arithmetic,
        costs,
        copy=0.0,
        ranks=cluster.ranks,
        cores=1.0,  # compression takes the GPU's time
        rings=cluster.rings,
        by_need=False,
        launches=step.launches * step.micro_batches,
        bus=cluster.bus < float("inf"),
    )
    return predicted(parts, spec, "backward", cluster.ranks, bucket_mb)


def cost_of(spec: str, cluster: Cluster) -> Cost:
    """Return what a compressor costs on a cluster's GPUs, whose arithmetic waits for memory. `hosts+` encodes shares."""
    inner = spec.rpartition("+")[2]
    cost = COSTS.get(inner) or (DEAREST if "core=" in inner else COSTS.get(inner.partition(":")[0], DEAREST))
    shares = cluster.gpus_per_host if spec.startswith(PER_HOST) else 1
    return Cost(cost.encode * COPY["H200"] / COPY[cluster.gpu] / shares, cost.launches)


def readiness(gradients: Mapping[str, Tensor], free: Sequence[str] = (), tied: Sequence[str] = ()) -> dict[str, float]:
    """Return by parameter the part of backward until its gradient is there, if time goes by elements, as in multiplications.

    Args:
        gradients: parameters in the order in which backward makes their gradients ready.
        free: the names of those that take no time, such as an embedding.
        tied: the names of those that the last layer shares with the first: it takes time first, and is ready last.

    Returns:
        The parts, between 0 and 1.

    >>> weights = {"a": torch.empty(3), "b": torch.empty(1), "wte": torch.empty(4)}
    >>> readiness(weights, tied=["wte"])
    {'a': 0.875, 'b': 1.0, 'wte': 1.0}
    """
    sizes = {name: 0 if name in {*free, *tied} else each.numel() for name, each in gradients.items()}
    first = sum(gradients[name].numel() for name in tied)
    total = max(1, first + sum(sizes.values()))
    done = accumulate(sizes.values(), initial=first)
    next(done)
    return {name: 1.0 if name in tied else at / total for name, at in zip(sizes, done, strict=True)}


def gpt(
    width: int, layers: int, vocabulary: int, context: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the gradients of a GPT whose head shares the embedding, as backward makes them ready. GPT-2 small: 768, 12."""
    gradients: dict[str, Tensor] = {}
    for layer in reversed(range(layers)):
        for name, shape in (("mlp2", (width, 4 * width)), ("mlp1", (4 * width, width)), ("proj", (width, width))):
            gradients[f"{layer}.{name}"] = torch.empty(shape, dtype=dtype, device="meta")
        gradients[f"{layer}.qkv"] = torch.empty((3 * width, width), dtype=dtype, device="meta")
    gradients["wpe"] = torch.empty((context, width), dtype=dtype, device="meta")
    gradients["wte"] = torch.empty((vocabulary, width), dtype=dtype, device="meta")
    return gradients


def layered(parameters: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the gradients of a transformer with so many parameters, without embedding: a layer for each 64 of its width.

    The width is a multiple of `WIDTHS`, as that of most models, so blocks of compressors need no tables.
    """
    width = WIDTHS * max(1, round((parameters * HEAD_DIMENSION / 12) ** (1 / 3) / WIDTHS))
    gradients = {
        name: each for name, each in gpt(width, parameters // (12 * width**2), 1, 1, dtype).items() if "." in name
    }
    rest = divmod(parameters - sum(each.numel() for each in gradients.values()), width)
    shapes = {"matrix": (rest[0], width), "vector": (rest[1],)}
    return gradients | {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items() if shape[0]
    }


def model_step(model: nn.Module, order: Sequence[Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients of a model and their readiness. `order`: its parameters as backward makes them ready."""
    names: dict[Tensor, str] = {each: name for name, each in model.named_parameters() if each.requires_grad}
    tables = {names[m.weight] for m in model.modules() if isinstance(m, nn.Embedding) and m.weight in names}
    others = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    used = {names[each] for m in others for each in m.parameters(recurse=False) if each in names}
    gradients = {names[each]: each for each in order}
    return gradients, readiness(gradients, free=sorted(tables - used), tied=sorted(tables & used))
