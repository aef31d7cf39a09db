"""Laws that every compressor keeps, checked on simulated ranks in this process: for the tests of a plug-in.

>>> from gradwire.testing import check_laws
>>> check_laws("int4:error_feedback=1")

`check_laws` checks all of them on small buckets. Each law is a function, too, for a bucket of your own. A law that does not
hold raises AssertionError, which says where and by how much. No law touches torch's random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor

from .compress import Compressor, Layout, Ranks, Simulation, Traffic, compressor
from .compress.builder.build import Spec
from .compress.state import tree

__all__ = [
    "SHAPES",
    "bucket",
    "check_conservation",
    "check_laws",
    "check_not_finite",
    "check_private",
    "check_resume",
    "check_telescoping",
    "check_traffic",
    "check_zeros",
    "held_back",
    "random_gradients",
]

SHAPES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "one element": ((1,),),
    "prime": ((1009,),),
    "one huge, many tiny": (*(((3,),) * 20), (101, 103)),
    "layers": ((64, 32), (7,), (13, 3, 3, 3), (1,), (5, 1)),
}
LONG = 300  # steps after which each element of a small bucket was sent several times


def bucket(shapes: Sequence[tuple[int, ...]], *, ranks: int = 2, dtype: torch.dtype = torch.float32) -> Layout:
    """Return the layout of a bucket on the CPU, whose parameters are p0, p1, ...

    Args:
        shapes: of the parameters.
        ranks: how many ranks are simulated.
        dtype: of the gradients.

    Returns:
        The layout.
    """
    names = tuple(f"p{place}" for place in range(len(shapes)))
    return Layout(names, tuple(shapes), dtype, torch.device("cpu"), Ranks(ranks))


def random_gradients(layout: Layout, generator: torch.Generator) -> list[Tensor]:
    """Return normal gradients of a bucket.

    Args:
        layout: the bucket.
        generator: whose numbers they are.

    Returns:
        A flat gradient for each rank.
    """
    ranks = layout.ranks.world_size
    return [torch.randn(layout.numel, generator=generator).to(layout.dtype) for _ in range(ranks)]


def held_back(simulation: Simulation, layout: Layout) -> Tensor:
    """Return the mean over ranks of what they hold back, flat, in float64."""
    total = torch.zeros(layout.numel, dtype=torch.float64)
    for state in simulation.states:
        for name, numbers in tree.held_back(state).items():
            layout.views(total)[name].view(-1).add_(numbers.double() / layout.ranks.world_size)
    return total


def check_conservation(spec: Spec, layout: Layout, *, steps: int = 3, tolerance: float = 2e-6) -> None:
    """Check that all ranks get the same average, and that what goes in comes out or is held back.

    Args:
        spec: the compressor, with `error_feedback=1` unless it loses nothing.
        layout: the bucket.
        steps: how many steps.
        tolerance: of an element, relative to the largest: that of sums in float32; 0.01 for averages in bfloat16.

    Raises:
        AssertionError: the law does not hold.
    """
    simulation, generator = Simulation(compressor(spec), layout), torch.Generator().manual_seed(0)
    for step in range(steps):
        gradients = random_gradients(layout, generator)
        given = _mean(gradients) + held_back(simulation, layout)
        averages = simulation.step(gradients)
        _require(bool(averages[0].isfinite().all()), f"step {step}: the average of finite gradients is not finite")
        _require(all(torch.equal(each, averages[0]) for each in averages), f"step {step}: ranks got different averages")
        missing = given - averages[0].double() - held_back(simulation, layout)
        off = float(missing.abs().max() / max(1.0, float(given.abs().max())))
        part = f"step {step}: a gradient is off by {off:.2g}: that part is neither in the average nor in a residual"
        _require(off <= tolerance, part)


def check_telescoping(spec: Spec, layout: Layout, *, steps: int = LONG, tolerance: float = 0.4) -> None:
    """Check that with a constant gradient the mean average tends to it as one over the number of steps.

    Args:
        spec: the compressor, with `error_feedback=1`.
        layout: the bucket.
        steps: how many steps.
        tolerance: the error after all steps over that after a tenth of them. Codecs of one bit come near the default.

    Raises:
        AssertionError: the law does not hold.
    """
    simulation, generator = Simulation(compressor(spec), layout), torch.Generator().manual_seed(0)
    gradients = random_gradients(layout, generator)
    target, total, errors = _mean(gradients), torch.zeros(layout.numel, dtype=torch.float64), []
    for step in range(1, steps + 1):
        total += simulation.step(gradients)[0].double()
        errors.append(float((total / step - target).norm() / target.norm()))
    early, late = errors[steps // 10 - 1], errors[-1]
    told = f"the mean of {steps} averages is off by {late:.2g}, and that of {steps // 10} by {early:.2g}"
    _require(late <= max(tolerance * early, 1e-5), f"{told}: it should fall as 1/T")


def check_not_finite(spec: Spec, layout: Layout) -> None:
    """Check that one number that is not finite, on one rank, shows in the average of every rank.

    Args:
        spec: the compressor.
        layout: the bucket.

    Raises:
        AssertionError: the law does not hold.
    """
    generator = torch.Generator().manual_seed(0)
    for name, rank, bad in product(layout.names, range(layout.ranks.world_size), (torch.inf, -torch.inf, torch.nan)):
        gradients = random_gradients(layout, generator)
        numbers = layout.views(gradients[rank])[name].view(-1)
        numbers[int(torch.randint(len(numbers), (), generator=generator))] = bad
        averages = Simulation(compressor(spec), layout).step(gradients)
        hidden = [place for place, each in enumerate(averages) if each.isfinite().all()]
        _require(not hidden, f"{bad} in {name} of rank {rank} does not show in the average of ranks {hidden}")


def check_zeros(spec: Spec, layout: Layout) -> None:
    """Check that gradients of zeros, as of frozen parameters, have an average of exact zeros.

    Args:
        spec: the compressor.
        layout: the bucket.

    Raises:
        AssertionError: the law does not hold.
    """
    zeros = [torch.zeros(layout.numel, dtype=layout.dtype)] * layout.ranks.world_size
    average = Simulation(compressor(spec), layout).step(zeros)[0]
    _require(not average.count_nonzero(), f"the average of zeros has {int(average.count_nonzero())} other numbers")


def check_traffic(spec: Spec, layout: Layout, *, steps: int = 3) -> None:
    """Check that the values of gradients change neither bytes nor rounds, as `gradwire.plan` assumes.

    Args:
        spec: the compressor.
        layout: the bucket.
        steps: how many steps.

    Raises:
        AssertionError: the law does not hold.
    """
    generator = torch.Generator().manual_seed(0)
    ways = [
        random_gradients(layout, generator),
        [torch.zeros(layout.numel, dtype=layout.dtype)] * layout.ranks.world_size,
    ]
    first, second = (list(_traffic(compressor(spec), layout, way, steps)) for way in ways)
    _require(first == second, f"random gradients send {first}, and zeros {second}: values change the bytes")


def check_private(spec: Spec, layout: Layout) -> None:
    """Check that torch's random numbers stay as they were, and that a seed repeats all.

    Args:
        spec: the compressor.
        layout: the bucket.

    Raises:
        AssertionError: the law does not hold.
    """
    before, generator = torch.get_rng_state(), torch.Generator().manual_seed(0)
    gradients = random_gradients(layout, generator)
    runs = [Simulation(compressor(spec), layout) for _ in range(2)]
    for step in range(3):
        first, second = (run.step(gradients)[0] for run in runs)
        _require(torch.equal(first, second), f"step {step}: two runs from the same start differ")
    untouched = torch.equal(torch.get_rng_state(), before)
    _require(untouched, "torch's random numbers have changed: draw from a Generator of your own")


def check_resume(spec: Spec, layout: Layout, *, steps: int = 3) -> None:
    """Check that a run continues to the bit from the state that it saved.

    Args:
        spec: the compressor.
        layout: the bucket.
        steps: how many steps.

    Raises:
        AssertionError: the law does not hold.
    """
    built, generator = compressor(spec), torch.Generator().manual_seed(0)
    run, resumed = Simulation(built, layout), Simulation(built, layout)
    for _ in range(steps):
        run.step(random_gradients(layout, generator))
    for old, new in zip(run.states, resumed.states, strict=True):
        owed = tree.load(new, {name: dict(fields) for name, fields in tree.save(old).items()})
        _require(
            not owed, f"a state does not load where it was saved: {', '.join(owed)} went back to the next gradient"
        )
        tree.set_step(new, steps)
    for step in range(steps, 2 * steps):
        gradients = random_gradients(layout, generator)
        first, second = run.step(gradients)[0], resumed.step(gradients)[0]
        off = float((first.double() - second.double()).abs().max())
        _require(torch.equal(first, second), f"step {step}: off by {off:.2g} after a resume")


def check_laws(spec: Spec, *, tolerance: float = 2e-6, steps: int = LONG) -> None:
    """Check all laws of this module on small buckets of one to four ranks. It takes a few seconds.

    Args:
        spec: a name with options, a mapping, or the compressor. With `error_feedback=1` nothing may be lost.
        steps: as of `check_telescoping`. A compressor sends each of some 900 elements several times in these steps.
        tolerance: as of `check_conservation`.

    Raises:
        AssertionError: a law does not hold.
        ValueError: the compressor is unknown, or has a wrong option.
    """
    for shapes in SHAPES.values():
        for ranks in (1, 2, 3, 4):
            layout = bucket(shapes, ranks=ranks)
            check_conservation(spec, layout, tolerance=tolerance)
            check_traffic(spec, layout)
    layout = bucket(SHAPES["layers"])
    check_not_finite(spec, layout)
    check_zeros(spec, layout)
    check_private(spec, layout)
    check_resume(spec, layout)
    check_telescoping(spec, bucket(((32, 24), (101,), (7,))), steps=steps)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _mean(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.double() for each in gradients]).mean(0)


def _traffic(built: Compressor, layout: Layout, gradients: Sequence[Tensor], steps: int) -> Iterator[Traffic]:
    simulation = Simulation(built, layout)
    for _ in range(steps):
        simulation.step(gradients)
        yield simulation.traffic
