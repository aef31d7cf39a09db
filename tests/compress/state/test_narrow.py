"""Numbers in 8 or 16 bits: what is rounded off is bounded, zeros stay zero, and what was packed packs to itself."""

import pytest
import torch

from gradwire.compress import Layout, Ranks
from gradwire.compress.state.leaf import BLOCK, Narrow
from gradwire.compress.state.tensors import Chunk, PerParameter

SIZES = [0, 1, 7, 8, 127, 128, 129, 1000]
CPU = torch.device("cpu")


def numbers_of(size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=dtype) * torch.logspace(-3, 3, size, dtype=dtype)


def lost_at_most(numbers, bits):
    """The most that each element may lose, by the definition of the format."""
    if bits == 16:
        return numbers.abs() / 256
    blocks = numbers.split(BLOCK) if numbers.numel() else ()
    return torch.cat([numbers[:0], *(torch.full_like(block, block.abs().max() / 254 * (1 + 1e-5)) for block in blocks)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("size", SIZES)
def test_an_element_loses_half_a_unit_at_most_and_packs_to_itself(size, bits, dtype):
    store, numbers = Narrow(bits, (size,), dtype, rows=2), numbers_of(size, dtype)
    packed = store.zeros(CPU)
    store.pack(torch.cat([torch.zeros_like(numbers), numbers]), packed)
    both = store.unpacked(packed)
    assert both.dtype == dtype
    assert not both[:size].any()
    assert bool(((both[size:] - numbers).abs() <= lost_at_most(numbers, bits)).all())
    again = store.zeros(CPU)
    store.pack(both, again)
    assert torch.equal(store.unpacked(again), both)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_factor_reaches_all_numbers_and_zeros_stay_zero(bits, in_place):
    store, numbers = Narrow(bits, (300,), torch.float32), numbers_of(300)
    numbers[100:200] = 0
    packed = store.zeros(CPU)
    store.pack(numbers, packed)
    before, after = store.unpacked(packed), packed if in_place else torch.empty_like(packed)
    store.multiply(packed, 0.5, after)
    assert torch.equal(store.unpacked(after), 0.5 * before)
    assert not store.unpacked(after)[100:200].any()


@pytest.mark.parametrize("factor", [0.7, 0.9, 3.0])
@pytest.mark.parametrize("size", [5, 100 * BLOCK - 3])
def test_what_was_multiplied_is_the_same_bits_after_it_was_saved_and_loaded(size, factor):
    layout = Layout(("a",), ((size,),), torch.float32, CPU, Ranks(1))
    leaf, other = (PerParameter.zeros(layout, 8, residual=True) for _ in range(2))
    leaf.set(numbers_of(size))
    leaf.multiply(factor)
    other.load("r", leaf.save("r"))
    assert torch.equal(other.flat, leaf.flat)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("versioned", [True, False])
def test_a_step_on_a_narrow_leaf_is_that_on_a_wide_one_but_for_rounding(bits, versioned):
    layout = Layout(("a", "b"), ((10, 20), (50,)), torch.float32, CPU, Ranks(2, 1))
    made = [
        (lambda bits: PerParameter.zeros(layout, bits, residual=True)),
        (lambda bits: Chunk.zeros(layout, 120, 250, bits)),
    ]
    for make in made:
        wide, narrow = make(32), make(bits)
        narrow.versioned = versioned
        for step in range(3):
            given = numbers_of(wide.numel, seed=step)
            held = narrow.open()
            torch.add(held.before, given, out=held.after)
            narrow.close(held)
            narrow.keep()
            wide.flat.add_(given)
        limit = wide.wide().abs().max() * 3 / 100
        assert (narrow.wide() - wide.wide()).abs().max() <= limit
        saved = narrow.save("r")
        other = make(bits)
        assert other.load("r", saved) == {}
        assert torch.equal(other.wide(), narrow.wide())
        assert narrow.held_back().keys() == wide.held_back().keys()
