"""`gradwire compressors`: the description of each compressor, and its options with their defaults."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..compress.builder.build import UnknownCompressor, compressors
from ..compress.protocol.registry import BASELINES, Registration, find


@dataclass(frozen=True)
class CompressorsConfig:
    """The compressors to describe."""

    names: list[str] = field(default_factory=list)
    """names of compressors to describe in full; none: a line about each"""


def compressors_command(config: CompressorsConfig) -> int:
    """Print the texts of compressors; the command's exit code."""
    listed = compressors()
    names = [*listed, *BASELINES]
    if unknown := [name for name in config.names if name not in names]:
        raise UnknownCompressor(unknown[0], names)
    found = [method for name in config.names or names if (method := find(name)) is not None]
    if config.names:
        print("\n\n".join("\n".join(text_of(method)) for method in found))
    else:
        print("\n".join(f"{method.name:<18}{method.summary}" for method in found))
    return 0


def text_of(method: Registration) -> Iterator[str]:
    """Yield the description of a compressor, with those of the classes that it extends, and its options."""
    yield method.name
    for each in method.factory.__mro__:
        if dataclasses.is_dataclass(each) and each.__doc__:
            title = "" if each is method.factory else f"{each.__name__}: "
            yield f"\n{title}{inspect.cleandoc(each.__doc__)}"
    yield "\noptions:"
    for option, (_, default) in method.options.items():
        yield f"  {option}={str(default).lower() if isinstance(default, bool) else default}"
