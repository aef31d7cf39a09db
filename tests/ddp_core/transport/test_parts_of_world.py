"""Every part of a mesh has a number of its own: its place along the axes on which its ranks do not average."""

import itertools

import pytest
import torch

from gradwire.ddp_core.transport.parts_of_world import part_of_world

SHAPES = [(4,), (2, 3), (3, 2), (2, 1, 2), (2, 2, 3)]


def parts_of(shape, axes):
    """(the ranks of a part, its place along the other axes) of each rank of a mesh whose parts lie along these axes."""
    mesh = torch.arange(torch.Size(shape).numel()).view(shape)
    others = [axis for axis in range(len(shape)) if axis not in axes]
    parts = mesh.permute(*others, *axes).reshape(-1, torch.Size([shape[axis] for axis in axes]).numel())
    return list(enumerate(parts.tolist()))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_part_is_numbered_by_its_place_along_the_axes_that_it_does_not_take(shape):
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            parts = parts_of(shape, axes)
            expected = [f"part {place} of {len(parts)}" if len(parts) > 1 else "" for place, _ in parts]
            assert [part_of_world(ranks, torch.Size(shape).numel()) for _, ranks in parts] == expected


def test_parts_that_are_not_alike_have_names_of_their_own():
    assert len({part_of_world(ranks, 6) for ranks in ([0, 5], [1, 2], [3], [4])}) == 4
