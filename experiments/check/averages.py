"""The averages of a compressor on these ranks, against the mean of their gradients in float64 and a simulation."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compress import Layout, Ranks, Simulation, compressor
from ...compress.state.tree import save
from ...ddp_core import DistributedDataParallel, exchange, over

SHAPES = {"p0": (300, 200), "p1": (200,), "p2": (96, 7, 33), "p3": (513,), "p4": (64, 257)}
STEPS, BUCKET_MB = 8, 0.1
ROUNDING, ORDER, KERNELS = 1e-5, 3e-3, 0.05  # parts of the mean's norm, see `allowed`
PARAMETER, FEW = 0.25, 0.05  # part of a parameter's scale, and of its mean: a small one has few elements in `topk`
OTHER, MOST = 0.5, 0.8  # a residual this far, as a part of its norm, is another one; so far as a part of the furthest
LOST = "residuals are lost"
RESUMED = "int4"  # has a residual on each rank and one for what it sums
Named: TypeAlias = dict[str, Tensor]
Residuals: TypeAlias = dict[str, dict[str, Tensor]]


class WrongResult(RuntimeError):
    """These ranks do not compute what they should; the message is one sentence for a user."""


class Given(nn.Module):
    """Parameters of zeros; `forward` is a loss whose gradients are the given tensors, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, gradients: Named) -> Tensor:
        """Return the sum of the products of parameters and gradients."""
        return torch.stack([(each * gradients[name]).sum() for name, each in self.named_parameters()]).sum()


def gradients_of(rank: int) -> Named:
    """Return the gradients of a rank, which are the same in every step."""
    generator = torch.Generator().manual_seed(rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Training:
    """gradwire's DistributedDataParallel with a compressor, to which gradients are given."""

    def __init__(self, spec: str, device: torch.device) -> None:
        self._device, ids = device, [device] if device.type == "cuda" else None
        settings: dict[str, Any] = {"compressor": spec, "bucket_cap_mb": BUCKET_MB}
        settings["optimizer"] = torch.optim.SGD((model := Given().to(device)).parameters())
        self._model = DistributedDataParallel(model, ids, **settings)
        self.handle = self._model.compression

    def step(self, gradients: Named) -> Named:
        """Return the averages of one step, on the CPU."""
        self._model({name: each.to(self._device) for name, each in gradients.items()}).backward()
        named = self._model.module.named_parameters()
        averages = {name: grad.cpu().clone() for name, each in named if (grad := each.grad) is not None}
        self._model.zero_grad()
        return averages

    def steps(self, count: int) -> list[Named]:
        """Return the averages of some steps with this rank's gradients."""
        return [self.step(gradients_of(dist.get_rank())) for _ in range(count)]


@dataclass(frozen=True)
class Errors:
    """Distances from the exact mean, as parts of its norm: that of the first average, and that of the mean of all steps.

    `scale`: the part of the exact mean that the first one has. `scales`: the same of each parameter.
    """

    first: float
    mean: float
    scale: float
    scales: dict[str, float]


def errors_of(averages: Sequence[Named]) -> Errors:
    """Compare the averages of some steps with the exact mean, in float64."""
    true, first = exact_mean(), _flat(averages[0])
    mean = torch.stack(list(map(_flat, averages))).mean(0)
    off_first, off_mean = (float((each - true).norm() / true.norm()) for each in (first, mean))
    sizes = [averages[0][name].numel() for name in SHAPES]
    parts = zip(SHAPES, first.split(sizes), true.split(sizes), strict=True)
    scales = {name: float(mine @ part / (part @ part)) for name, mine, part in parts}
    return Errors(off_first, off_mean, float(first @ true / (true @ true)), scales)


def exact_mean() -> Tensor:
    """Return the mean of all ranks' gradients in float64."""
    return torch.stack([_flat(gradients_of(rank)) for rank in range(dist.get_world_size())]).mean(0)


def _flat(tensors: Named) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in SHAPES])


def simulated(spec: str, buckets: Sequence[tuple[str, ...]]) -> tuple[list[Named], Residuals]:
    """Return the averages of the same steps by all ranks in this process, on the CPU, and what this rank holds then."""
    ranks = Ranks(dist.get_world_size())
    averages: list[Named] = [{} for _ in range(STEPS)]
    held: Residuals = {}
    for names in buckets:
        shapes = tuple(SHAPES[name] for name in names)
        layout = Layout(names, shapes, torch.float32, torch.device("cpu"), ranks)
        bucket, given = Simulation(compressor(spec), layout), map(gradients_of, range(ranks.world_size))
        flats = [torch.cat([mine[name].flatten() for name in names]) for mine in given]
        for average in averages:
            average.update({name: each.clone() for name, each in layout.views(bucket.step(flats)[0]).items()})
        held.update(save(bucket.states[dist.get_rank()]))
    return averages, held


def lost_on(spec: str, buckets: Sequence[tuple[str, ...]], held: Residuals) -> str:
    """Return the ranks that hold other residuals than in a simulation, as words; nothing if none does. A collective call."""
    expected = simulated(spec, buckets)[1]
    mine, right = (
        torch.cat([each.get(name, {}).get("residual", torch.zeros(SHAPES[name])).flatten().cpu() for name in SHAPES])
        for each in (held, expected)
    )
    off = [float(each) for each in _messages(str(float((mine - right).norm() / right.norm().clamp(min=1e-30))))]
    ranks = [str(rank) for rank, each in enumerate(off) if each >= max(OTHER, MOST * max(off))]
    return f" on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else ""


def check_averages(spec: str, device: torch.device) -> tuple[Errors, Errors] | None:
    """Return the errors found and expected on rank 0, None on others. Raises WrongResult on all. A collective call."""
    errors: tuple[Errors, Errors] | None = None
    training, rank, told = Training(spec, device), dist.get_rank(), ""
    averages = training.steps(STEPS)
    buckets, held = [each.parameters for each in training.handle.stats().buckets], training.handle.state_dict()
    training.handle.close()
    if str(buckets) != _messages(str(buckets))[0]:
        told = f"with {spec}, rank {rank} has other buckets than rank 0"
    elif rank == 0:
        errors = errors_of(averages), errors_of(simulated(spec, buckets)[0])
        told = (wrong := verdict(*errors)) and f"with {spec}, {wrong}"
    if LOST in (found := first_of(told)):
        found = found.replace(LOST, f"{LOST}{lost_on(spec, buckets, held['parameters'])}")
    if found:
        raise WrongResult(found)
    if odd := odd_one(_messages(_digest(averages))):
        other, usual = odd
        told = f"with {spec}, rank {other} rounds differently: its averages have other bits than those of rank {usual}"
        raise WrongResult(told)
    return errors


def odd_one(digests: Sequence[str]) -> tuple[int, int] | None:
    """Return the first rank that differs from most, and the first of those; None if all are alike. Rank 0 decides a tie."""
    most = max(digests, key=digests.count)
    return next(((rank, digests.index(most)) for rank, each in enumerate(digests) if each != most), None)


def verdict(found: Errors, expected: Errors) -> str:
    """Return what is wrong with averages that have one error and should have another; nothing if they are right."""
    off = [
        name
        for name, scale in expected.scales.items()
        if not abs(found.scales[name] - scale) <= PARAMETER * abs(scale) + FEW
    ]
    if 0 < len(off) < len(expected.scales):
        scales = ", ".join(f"{name} {found.scales[name]:.2f} and {expected.scales[name]:.2f}" for name in off)
        return (
            f"the divisor of some parameters is wrong: parts of the exact mean that they have and should have: {scales}"
        )
    if not abs(found.scale - expected.scale) <= KERNELS * abs(expected.scale):
        return f"averages are {found.scale / expected.scale:.2f}x as large as they should be: the divisor is wrong"
    if not found.first <= allowed(expected.first):
        return f"the first average is {found.first:.2g} of its norm from the exact mean, {expected.first:.2g} expected"
    if not found.mean <= allowed(expected.mean):
        return (
            f"{LOST}: the mean of {STEPS} averages is {found.mean:.2g} of its norm from the exact mean, "
            f"{expected.mean:.2g} expected"
        )
    return ""


def allowed(error: float) -> float:
    """Return the largest error to accept where the simulation has this one.

    Sums in 16 bits depend on the order of the ranks, so theirs may be twice as large. Other kernels decide some ties
    differently.
    """
    return error + min(error, ORDER + KERNELS * error) + ROUNDING


def check_resumed(device: torch.device) -> None:
    """Raise WrongResult on all ranks unless a training that loads a checkpoint continues with the same bits."""
    half, whole, resumed = STEPS // 2, Training(RESUMED, device), Training(RESUMED, device)
    whole.steps(half)
    torch.save(whole.handle.state_dict(), file := io.BytesIO())
    file.seek(0)
    resumed.handle.load_state_dict(torch.load(file))
    expected, found = (_digest(each.steps(half)) for each in (whole, resumed))
    for each in (whole, resumed):
        each.handle.close()
    where = f"after a save and a load, {RESUMED} continues with other bits on rank {dist.get_rank()}"
    _raise_first(where if found != expected else "")


def check_swapped(device: torch.device) -> None:
    """Raise WrongResult on all ranks unless a swap to `none` sends all that residuals hold back."""
    training = Training(RESUMED, device)
    averages = training.steps(STEPS)
    training.handle.swap("none")
    averages.append(training.step({name: torch.zeros(shape) for name, shape in SHAPES.items()}))
    training.handle.close()
    exact = exact_mean()
    off = float((torch.stack(list(map(_flat, averages))).sum(0) / STEPS - exact).norm() / exact.norm())
    where = f"a swap from {RESUMED} to none loses {off:.2g} of the gradients on rank {dist.get_rank()}"
    _raise_first("" if off <= ROUNDING else where)


def _digest(averages: Sequence[Named]) -> str:
    tensors = [average[name] for average in averages for name in SHAPES]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()


def _messages(mine: str) -> list[str]:
    assert dist.group.WORLD is not None
    return exchange(mine, over(dist.group.WORLD), what="their results")


def first_of(told: str) -> str:
    """Return the sentence of the first rank that has one. A collective call."""
    return next(filter(None, _messages(told)), "")


def _raise_first(told: str) -> None:
    """Raise WrongResult on all ranks with the first rank's sentence, where any has one."""
    if found := first_of(told):
        raise WrongResult(found)
