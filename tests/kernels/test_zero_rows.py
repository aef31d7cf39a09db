"""Rows of parameters that have an element other than zero, against a look at every element."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Block, Rows

pytestmark = pytest.mark.usefixtures("backend")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
# Matrices, a vector, gaps between blocks, rows of one element, a row in two blocks; rows longer than a program's tile.
SMALL = (Block(3, 5, 7, 0), Block(38, 1, 9, 5), Block(50, 3, 1, 6), Block(60, 3, 1, 6), Block(63, 2, 8, 9))
LARGE = (Block(1, 3, 20_000, 0), Block(60_001, 40, 513, 3), Block(80_521, 1, 40_000, 43), Block(120_521, 4100, 2, 44))
CASES = {"small": SMALL, "large": LARGE, "none": (), "empty": (Block(0, 0, 4, 0), Block(0, 1, 3, 0))}


def sizes(blocks):
    numel = max((block.start + block.rows * block.size for block in blocks), default=0) + 5
    return numel, max((block.number + block.rows for block in blocks), default=0)


def elements(blocks):
    """{row: its elements}."""
    found = {}
    for block in blocks:
        for row in range(block.rows):
            first = block.start + row * block.size
            found.setdefault(block.number + row, []).extend(range(first, first + block.size))
    return found


def sparse(numel, dtype):
    """Mostly zeros, some of them negative; and numbers from the smallest to those that are none, or codes."""
    generator = torch.Generator().manual_seed(0)
    values = torch.zeros(numel)
    values[::3] = -0.0
    places = torch.randperm(numel, generator=generator)[: max(1, numel // 5000) + 3]
    numbers = [1, -2, 127, -128] if dtype == torch.int8 else [1e-45, -2.0, torch.inf, torch.nan]
    values[places] = torch.tensor(numbers, dtype=torch.float32)[torch.arange(len(places)) % 4]
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", CASES.values(), ids=CASES)
def test_rows_with_an_element_other_than_zero_are_marked_and_the_others_cleared(blocks, dtype):
    (numel, count), rows = sizes(blocks), Rows(blocks)
    values, used = sparse(numel, dtype), torch.zeros(count, dtype=torch.bool)
    kernels.mark_rows(values, used, rows)
    nonzero = (values != 0).tolist()
    expected = [any(nonzero[place] for place in places) for _, places in sorted(elements(blocks).items())]
    assert used.tolist() == expected
    kept, left = torch.ones(numel, dtype=dtype), torch.ones(numel)
    kernels.clear_rows(kept, used, rows)
    for row, places in elements(blocks).items():
        if not expected[row]:
            left[places] = 0
    assert torch.equal(kept.float(), left)


def test_marks_of_before_stay():
    used = torch.tensor([True, False])
    kernels.mark_rows(torch.tensor([0.0, 0.0, 0.0, 1.0]), used, Rows((Block(0, 2, 2, 0),)))
    assert used.tolist() == [True, True]
