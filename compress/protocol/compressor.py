"""The interfaces of compressors and codecs, and the traits that they declare beside `init` and `reduce`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor

from ...kernels import Residual
from .layout import Layout
from .requests import Program

C = TypeVar("C", bound=type)


@runtime_checkable
class Compressor(Protocol):
    """An algorithm that averages a bucket over ranks. A frozen dataclass of its own options; buckets share it."""

    def init(self, layout: Layout) -> Any:
        """Return the state of a bucket.

        Args:
            layout: the parameters of the bucket.

        Returns:
            A dataclass of the leaves of `gradwire.compress.state.tree`, or None.
        """

    def reduce(self, grad: Tensor, state: Any, residual: Residual | None = None) -> Program[Tensor]:
        """Return the program that averages a bucket over ranks.

        Args:
            grad: this rank's gradients, flat. The program may overwrite them, and returns the average in their place
                if it can.
            state: the state that `init` returned. Its numbers change by `update()` of its leaves, so that a step can
                be undone.
            residual: the residual of error feedback; None means no error feedback. The program adds `residual.before`
                to `grad` and writes all of the new residual to `residual.after`. The two may share memory; if not,
                `before` stays as it is. A residual may be wider than `grad`.

        Returns:
            The program, whose result is the average.
        """


@runtime_checkable
class Codec(Protocol):
    """A method of one round: what one rank's numbers look like on the wire.

    The flat vector is cut into rows of `length` elements (the last may be shorter), each encoded by itself into
    `row_bytes(length)` bytes, so that an adapter can send rows to different ranks.
    """

    def row_length(self, numel: int) -> int:
        """Return the smallest row length, at least `numel`, that this codec can encode.

        Args:
            numel: the number of elements.

        Returns:
            Elements per row.
        """

    def row_bytes(self, length: int) -> int:
        """Return the bytes of an encoded row.

        Args:
            length: elements per row.

        Returns:
            Bytes per row.
        """

    def encode(self, grad: Tensor, residual: Residual | None, rows: Tensor, length: int) -> None:
        """Write the codes of `grad` (+ `residual.before`) to `rows`, and what they lack to `residual.after`.

        Args:
            grad: the flat vector, which may be overwritten.
            residual: the residual of error feedback, or None.
            rows: the codes, (rows, bytes) uint8.
            length: elements per row.
        """

    def decode(self, rows: Tensor, out: Tensor, length: int) -> None:
        """Write the mean of several ranks' codes to `out`.

        Args:
            rows: the codes, (ranks, rows, bytes) uint8.
            out: the flat vector.
            length: elements per row.
        """


def children(compressor: Any) -> Iterator[Compressor]:
    """The compressors directly inside a wrapper: its dataclass fields, and tuples in them, that are compressors."""
    if dataclasses.is_dataclass(compressor):
        for field in dataclasses.fields(compressor):
            yield from _compressors_in(getattr(compressor, field.name))


def inside(compressor: Any) -> Iterator[Any]:
    """A compressor and all that are inside of it."""
    yield compressor
    for child in children(compressor):
        yield from inside(child)


def _compressors_in(value: Any) -> Iterator[Compressor]:
    if isinstance(value, Compressor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _compressors_in(item)


@dataclass(frozen=True)
class Traits:
    """Properties of a compressor or codec that gradwire relies on; `register` and `with_traits` take them.

    A wrapper gets the traits marked "any" if one compressor inside it has them, those marked "all" if all have them, and
    no others. It may declare more.

    `takes_16_bits`: reads float16 and bfloat16 gradients itself, computes in float32, rounds the average once and puts the
    rounding error in the residual. Others get a float32 copy. A codec with this trait has a fourth argument of `decode`,
    the residual (a tensor, or None) that takes the rounding error.
    `keeps_zeros` (codecs): decodes zeros as exact zeros. `TwoShot` sends a bit per row of parameters for others.
    `blocks` (codecs): elements share a scale by blocks of its `block` elements. `encode` and `decode` then take the argument
    `places`: the blocks' places in the flat vector, which begin anew at each parameter, or None where rows of `length` do.
    `draws` (codecs): draws random numbers. `encode` then gets the arguments `key` and `counter` as well; the 2^32 counters
    from `counter` on are its own.
    `averages`: returns the plain mean, so that gradients may be scaled before it.
    `ignores_shapes` (all): treats a bucket as a row of numbers, whatever its parameters. gradwire may cut it anywhere.
    `varies_with_threads` (any): on CPUs, ranks with other numbers of threads may round the average otherwise.
    `packs_bytes` (any): sends bytes. `fp16` and `bf16` refuse to wrap it, as they would change nothing.
    `forgets_what_it_sends` (any): clears the residual of what it sends before the average arrives. `fp16` then lets large
    payloads overflow; for others it cuts them, since the residual keeps what is missing.
    `by_name` (any): treats parameters by their names.
    `needs_all_parameters` (any): needs the gradients of all parameters in every step.
    `ranks_per_host` (any): has two levels, hosts and their ranks; this many ranks share a host, 0 if gradwire finds it out.
    `choices` (the largest): the number of compressors among which the ranks choose.
    `residual_first`: is done with the residual of a wide gradient (float32, float64) before its first request. Later it at
    most writes zeros to `residual.after`, which may have another dtype by then.
    `extra_rounds_in`: a function that returns True for the steps (from 0) that take more rounds than others.
    """

    takes_16_bits: bool = False
    keeps_zeros: bool = False
    blocks: bool = False
    draws: bool = False
    averages: bool = False
    ignores_shapes: bool = False
    varies_with_threads: bool = False
    packs_bytes: bool = False
    forgets_what_it_sends: bool = False
    by_name: bool = False
    needs_all_parameters: bool = False
    ranks_per_host: int | None = None
    choices: int = 1
    residual_first: bool = False
    extra_rounds_in: Callable[[int], bool] | None = None


Declared: TypeAlias = Traits | Callable[[Any], Traits]  # of all objects of a class, or by an object's options
_declared: dict[type, Declared] = {}
OURS = __name__.partition(".")[0]


def with_traits(declared: Declared) -> Callable[[C], C]:
    """Class decorator: declare the traits of a class that is not registered, such as a wrapper.

    Subclasses do not inherit them.

    Args:
        declared: the traits, or a function that returns them for an object.

    Returns:
        The decorator.

    Raises:
        TypeError: `declared` is neither.
    """
    if not isinstance(declared, Traits) and not callable(declared):
        raise TypeError(f"traits are gradwire.compress.Traits(...) or a function that returns them, got {declared!r}")

    def declare(factory: C) -> C:
        _declared[factory] = declared
        return factory

    return declare


def own_traits(compressor: Any) -> Traits:
    """Return the traits that the class of a compressor or codec declares, without those of compressors inside it."""
    declared = _declared.get(type(compressor), Traits())
    return declared if isinstance(declared, Traits) else declared(compressor)


def traits_of(compressor: Any) -> Traits:
    """Return the traits of a compressor, with those that it has because of the compressors inside it.

    Args:
        compressor: a compressor or codec.

    Returns:
        Its traits.

    >>> from gradwire.compress import Dense, PowerSGD, Switch
    >>> traits_of(Dense()).ignores_shapes, traits_of(Switch({0: Dense(), 9: PowerSGD()})).ignores_shapes
    (True, False)
    """
    own, parts = own_traits(compressor), [traits_of(child) for child in children(compressor)]
    both = [own, *parts]
    hosts = [each.ranks_per_host for each in both if each.ranks_per_host is not None]
    return dataclasses.replace(
        own,
        ignores_shapes=own.ignores_shapes or (bool(parts) and all(each.ignores_shapes for each in parts)),
        varies_with_threads=any(each.varies_with_threads for each in both),
        packs_bytes=any(each.packs_bytes for each in both),
        forgets_what_it_sends=any(each.forgets_what_it_sends for each in both),
        by_name=any(each.by_name for each in both),
        needs_all_parameters=any(each.needs_all_parameters for each in both),
        ranks_per_host=max(hosts, default=None),
        choices=max(each.choices for each in both),
    )


def unnamed(compressor: Compressor, layouts: Sequence[Layout]) -> list[Layout]:
    """Return layouts with numbers for names, so that equal shapes are equal; as they are if a compressor goes by names.

    One from elsewhere may.
    """
    ours = all(type(each).__module__.startswith(f"{OURS}.") for each in inside(compressor))
    if traits_of(compressor).by_name or not ours:
        return list(layouts)
    return [dataclasses.replace(each, names=tuple(map(str, range(len(each.names))))) for each in layouts]
