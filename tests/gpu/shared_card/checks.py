"""The table of checks: a function of a `World`, by the file that it stands in."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """`function(world)` raises where something is wrong. `least`: ranks that it needs. `ends`: it is to end all ranks."""

    function: object
    least: int = 2
    ends: bool = False


_table = {}


def check(least=2, ends=False):
    """Add a function to the table."""

    def add(function):
        file = Path(function.__code__.co_filename).stem
        _table.setdefault(file, {})[function.__name__] = Check(function, least, ends)
        return function

    return add


def checks_in(file, ranks):
    """Return the checks of a file that so many ranks can run, {name: Check}, in the order in which they stand there."""
    import_module(f".{file}", __package__)
    return {name: each for name, each in _table[file].items() if ranks >= each.least}
