"""Layouts of parts of parameters: slices and shards, whose state is keyed by name and first element."""

import dataclasses

import pytest
import torch

from gradwire.compress import Layout, Partition, Ranks, compressor
from gradwire.compress.state.leaf import Versions
from gradwire.compress.state.tree import Chunk, PerParameter

from ..given import assert_goes_on_after_a_load, layout

CPU = torch.device("cpu")


def parts(**places):
    """A layout of parts: {name: (first element, elements)}."""
    names, shapes = tuple(places), tuple((size,) for _, size in places.values())
    return Layout(names, shapes, torch.float32, CPU, starts=tuple(first for first, _ in places.values()))


def leaf(within, start=0):
    return PerParameter(within, Versions(torch.arange(float(within.numel)) + start), residual=True)


def test_parts_lie_as_whole_parameters_would():
    within, whole = parts(a=(4, 3), b=(0, 2)), layout((3,), (2,), names=("a", "b"))
    flat = torch.arange(5.0)
    assert (within.sizes, within.offsets, within.numel) == (whole.sizes, whole.offsets, whole.numel)
    assert all(torch.equal(within.views(flat)[name], whole.views(flat)[name]) for name in "ab")
    assert [within.start(name) for name in "ab"] == [4, 0]
    assert [whole.start(name) for name in "ab"] == [None, None]


@pytest.mark.parametrize(
    ("names", "starts", "message"),
    [
        (("a", "b"), (1,), r"for each of 2 names; got \(1,\)"),
        (("a", "b"), (0, -1), r"0 or above.*got \(0, -1\)"),
        (("a", "a"), (0, 5), r"one part of a parameter at most, got \('a', 'a'\)"),
    ],
)
def test_parts_that_cannot_be_are_refused(names, starts, message):
    with pytest.raises(ValueError, match=message):
        Layout(names, ((5,), (5,)), torch.float32, CPU, starts=starts)


def test_chosen_entries_keep_their_parts_and_their_hosts():
    within = dataclasses.replace(parts(a=(4, 3), b=(0, 2), c=(1, 1)), ranks=Ranks(4, per_host=2))
    assert within.select([2, 0]) == dataclasses.replace(parts(c=(1, 1), a=(4, 3)), ranks=Ranks(4, per_host=2))
    assert layout((3,), (2,), names=("a", "b")).select([1]) == layout((2,), names=("b",))


@pytest.mark.parametrize("saved_in", [[(0, 12)], [(0, 4), (4, 8)], [(0, 7), (7, 5)], None], ids=str)
def test_parts_can_be_loaded_from_a_whole_or_from_other_parts(saved_in):
    saved = {"a": {}}
    if saved_in is None:
        saved = leaf(layout((3, 4), names=("a",))).save("residual")
    for first, size in saved_in or ():
        saved["a"] |= leaf(parts(a=(first, size)), start=first).save("residual")["a"]
    here = PerParameter.zeros(parts(a=(2, 6)), residual=True)
    here.load("residual", saved)
    assert here.flat.tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("saved", "here"),
    [
        (parts(a=(8, 5)), layout((3, 4), names=("a",))),
        (layout((3, 4), names=("a",)), parts(a=(8, 5))),
        (layout((3, 4), names=("a",)), layout((4, 3), names=("a",))),
    ],
    ids=["a part beyond the whole", "a whole too small for the part", "another shape"],
)
def test_numbers_that_do_not_fit_are_refused_by_name(saved, here):
    with pytest.raises(ValueError, match=r"the saved 'residual' of parameter 'a' has shape .*is needed here"):
        leaf(here).load("residual", leaf(saved).save("residual"))


def test_what_may_be_drawn_anew_is_taken_for_the_same_part_only():
    factor = PerParameter(parts(a=(4, 3)), Versions(torch.ones(3)), optional=True)
    for other in (parts(a=(4, 2)), parts(a=(5, 3)), layout((3,), names=("a",))):
        factor.load("q", PerParameter.zeros(other, optional=True).save("q"))
        assert factor.flat.tolist() == [1, 1, 1]
    factor.load("q", PerParameter.zeros(parts(a=(4, 3)), optional=True).save("q"))
    assert factor.flat.tolist() == [0, 0, 0]


def test_a_server_s_part_is_loaded_for_the_part_that_saved_it():
    within = parts(a=(4, 6), b=(0, 2))
    saved = Chunk(within, 2, Versions(torch.arange(5.0))).save("server")
    assert sorted(saved["a"]) == ["server@4", "server@4.first"]
    here = Chunk(within, 2, Versions(torch.zeros(5)))
    assert here.load("server", saved) == {}
    assert here.flat.tolist() == [0, 1, 2, 3, 4]
    moved = Chunk(within, 0, Versions(torch.zeros(5))).load("server", saved)
    assert {name: numbers.tolist() for name, numbers in moved.items()} == {"a": [0, 0, 0, 1, 2, 3], "b": [4, 0]}
    for other in (parts(a=(3, 6)), layout((6,), names=("a",))):
        with pytest.raises(ValueError, match=r"of parameter 'a' was saved from element 4 on, and is needed here"):
            Chunk(other, 0, Versions(torch.zeros(5))).load("server", saved)


@pytest.mark.parametrize(
    "spec",
    ["powersgd:rank=2", "batched-powersgd", "topk", "onebit:block=8", "randomk:block=16", "acp-powersgd", "partition"],
)
def test_every_compressor_takes_parts_and_goes_on_from_a_saved_state_to_the_bit(spec):
    built = Partition((("b", compressor("topk")),), compressor("powersgd")) if spec == "partition" else compressor(spec)
    within = Layout(("a", "b"), ((16, 12), (5,)), torch.float32, CPU, Ranks(2), starts=(24, 100))
    assert_goes_on_after_a_load(built, within, steps=2)
