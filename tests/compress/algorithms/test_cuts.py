"""Rows of payload whose blocks begin anew at each parameter, and their tables."""

import itertools

import pytest
import torch

from gradwire.compress import Layout, Ranks
from gradwire.compress.algorithms.cuts import cut_bucket, cut_shards
from gradwire.compress.shards.reduction import shard_sum

CODEC = shard_sum("int4").codec
SIZES = [(7,), (128, 128), (130, 5, 0, 256, 3), (0, 9), (1000, 1, 1, 1), (64, 64, 3)]


def layout(sizes, device, ranks=1):
    names = tuple(f"p{place}" for place in range(len(sizes)))
    return Layout(names, tuple((size,) for size in sizes), torch.float32, torch.device(device), Ranks(ranks))


def seen(cut):
    """A cut but for the numbers in its tables."""
    tables = [None if each is None else (each.table.shape, each.blocks, each.stride) for each in (cut.rows, cut.own)]
    return cut.length, cut.served, cut.gaps, tables


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_rows_of_all_ranks_are_the_whole_bucket_one_behind_the_other(sizes, ranks):
    cuts = [cut_bucket(CODEC, layout(sizes, "cpu"), ranks, rank) for rank in range(ranks)]
    starts, stops = zip(*(cut.served for cut in cuts), strict=True)
    assert (starts[0], stops[-1]) == (0, sum(sizes))
    assert starts[1:] == stops[:-1]
    borders = set(itertools.accumulate(sizes))
    for place, cut in enumerate(cuts):
        if cut.own is not None:
            firsts, counts = (each.tolist() for each in cut.own.spans())
            assert sum(counts) == stops[place] - starts[place]
            spans = [
                (starts[place] + first, starts[place] + first + size)
                for first, size in zip(firsts, counts, strict=True)
            ]
            assert not any(first < border < end for first, end in spans for border in borders)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", SIZES)
def test_on_the_meta_device_a_cut_is_the_same_but_for_its_table(sizes, ranks):
    for rank in range(ranks):
        here, there = (cut_bucket(CODEC, layout(sizes, device), ranks, rank) for device in ("cpu", "meta"))
        assert seen(here) == seen(there)


@pytest.mark.parametrize("rows", [[[(0, 7), (7, 130)]] * 3, [[(0, 7), (7, 130)], [(0, 7), (7, 100)], [(0, 7), (7, 0)]]])
def test_so_is_one_of_shards(rows):
    here, there = (cut_shards(CODEC, rows, 137, 1, torch.device(device)) for device in ("cpu", "meta"))
    assert seen(here) == seen(there)


def test_a_row_decoded_alone_has_zeros_in_the_gaps_between_its_blocks():
    cut = cut_shards(CODEC, [[(0, 5), (9, 4)]] * 2, 16, 1, torch.device("cpu"))
    encoded = torch.zeros(1, cut.row_bytes, dtype=torch.uint8)
    cut.encode_own(torch.ones(16), None, encoded)
    out = torch.full((16,), torch.nan)
    cut.decode_own(encoded.unsqueeze(1), out)
    assert (out == 0).tolist() == [False] * 5 + [True] * 4 + [False] * 4 + [True] * 3


def test_a_plan_of_a_large_model_makes_no_table():
    """It would take more memory than there is."""
    sizes = (2**50 + 1, 7)
    assert cut_bucket(CODEC, layout(sizes, "meta"), 4, 1).rows.blocks > 2**40
    assert (
        cut_shards(CODEC, [[(0, 2**50 + 1), (2**50 + 1, 7)]] * 4, 2**50 + 8, 1, torch.device("meta")).own.blocks > 2**40
    )
