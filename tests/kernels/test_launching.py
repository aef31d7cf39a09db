"""Launches of Triton's kernels: what was compiled for a call serves calls alike, and no others."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.kernels.triton_kernels.launching import Launched


class Kernel:
    """In the place of a kernel of Triton. `searches`: for what is compiled; `ran`: (grid, arguments)."""

    def __init__(self, *names, free=()):
        self.params = [
            SimpleNamespace(name=name, is_constexpr=name.isupper(), do_not_specialize=name in free) for name in names
        ]
        self.searches, self.ran = 0, []

    def __getitem__(self, grid):
        return self._search

    def _search(self, *arguments, **constants):
        self.searches += 1
        return Compiled(self.ran)


class Compiled:
    """What was compiled: it runs on any grid."""

    def __init__(self, ran):
        self._ran = ran

    def __getitem__(self, grid):
        return lambda *given: self._ran.append((grid, given))


MEMORY = torch.zeros(64)
FIRST = (MEMORY[:16], 32, 5, 0.5)


def launched():
    kernel = Kernel("source", "length", "size", "scale", "HELD", "TILE", free=("size", "scale"))
    launcher = Launched(kernel)
    launcher[3,](*FIRST, TILE=8, HELD=True, num_warps=4)
    return kernel, launcher


@pytest.mark.parametrize("again", [FIRST, (MEMORY[16:32], 64, 7, 2.0)], ids=["the same", "alike"])
def test_calls_alike_run_what_was_found_once(again):
    kernel, launcher = launched()
    launcher[5,](*again, TILE=8, HELD=True, num_warps=4)
    assert kernel.searches == 1
    ((grid, given),) = kernel.ran
    assert grid == (5, 1, 1)
    assert given[1:] == (*again[1:], True, 8)  # constants in the order of the kernel's parameters


@pytest.mark.parametrize(
    ("arguments", "constants"),
    [
        ((MEMORY[:16].double(), *FIRST[1:]), {}),
        ((MEMORY[1:17], *FIRST[1:]), {}),
        ((FIRST[0], 33, *FIRST[2:]), {}),
        ((FIRST[0], 1, *FIRST[2:]), {}),
        (FIRST, {"HELD": False}),
        (FIRST, {"TILE": 16}),
        (FIRST, {"num_warps": 8}),
    ],
    ids=["type", "place", "not divisible", "one", "a constant", "a size", "an option"],
)
def test_others_are_looked_for(arguments, constants):
    kernel, launcher = launched()
    launcher[3,](*arguments, **{"TILE": 8, "HELD": True, "num_warps": 4, **constants})
    assert kernel.searches == 2
