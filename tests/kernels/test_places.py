"""Blocks that lie anywhere in a vector: each is encoded and decoded as if it were alone."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Places, Residual
from gradwire.kernels.operands import FORMATS

from .given import numbers

pytestmark = pytest.mark.usefixtures("backend")
ROWS, BLOCKS = 2, 4
SPANS = {  # blocks: first elements and numbers of elements, of ROWS * BLOCKS of them; strides; elements of the vector
    "parameters": (32, [(0, 32), (32, 5), (37, 32), (69, 32), (101, 1), (102, 8), (110, 0), (110, 0)], 0, 110),
    "whole": (32, [*((3 + 32 * place, 32) for place in range(7)), (227, 29)], 0, 256),
    "gaps": (32, [(1, 7), (40, 32), (74, 32), (130, 3), (8, 9), (20, 20), (110, 19), (140, 0)], 0, 140),
    "turns": (16, [(0, 16), (16, 4), (20, 16), (36, 1)], 37, 74),
    "long": (9000, [(0, 9000), (9000, 17), (9017, 9000), (18_017, 0)], 18_020, 36_040),
}


def places_of(spans, stride):
    table = torch.tensor(spans, dtype=torch.int64)
    return Places(table, ROWS * BLOCKS, stride, not (table[:, 0] % 4).any() and not stride % 4)


def every(spans, stride):
    """All blocks, each in its turn."""
    turns = ROWS * BLOCKS // len(spans)
    return [(first + turn * stride, count) for turn in range(turns) for first, count in spans]


def signs_of(block):
    return torch.where(torch.arange(block) % 3 == 0, -1.0, 1.0)


def encoded(encode, grad, residual, rows, blocks, block, bits, dtype):
    scales, codes = torch.full((rows, blocks), 9.0), torch.full((rows, blocks * block * bits // 8), 77, dtype=dtype)
    encode(grad, residual, scales, codes, blocks * block)
    return scales, codes


def codings():
    yield "signs", 1, torch.uint8, {}, {}
    yield "rotated signs", 1, torch.uint8, {"turned": True}, {}
    for bits in FORMATS:
        yield f"{bits} bits", bits, torch.int8, {}, {}
    yield "rotated, 2 bits", 2, torch.int8, {"turned": True}, {}
    yield "at random", 4, torch.int8, {}, {"seed": 5}


@pytest.mark.parametrize("case", SPANS)
@pytest.mark.parametrize(
    ("bits", "dtype", "options", "levels"), [each[1:] for each in codings()], ids=[c[0] for c in codings()]
)
def test_a_block_has_the_bits_that_it_has_alone(case, bits, dtype, options, levels):
    block, spans, stride, size = SPANS[case]
    if options and block & (block - 1):
        pytest.skip("only powers of two are rotated")
    signs, places = signs_of(block) if options else None, places_of(spans, stride)
    grad, before = numbers(size, torch.float32), numbers(size, torch.float32, seed=1)

    def encode(start, places):
        def call(grad, residual, scales, codes, length):
            if bits == 1:
                return kernels.sign_pack(grad, residual, scales, codes, length, signs, places)
            counter = {"counter": start // 4} if "seed" in levels else {}
            kernels.quantize_blocks(
                grad, residual, scales, codes, length, bits, signs=signs, places=places, **levels, **counter
            )

        return call

    def decode(scales, codes, out, places):
        if bits == 1:
            return kernels.sign_unpack_mean(scales[None], codes[None], out, None, signs, places)
        kernels.dequantize_mean(scales[None], codes[None], out, bits, None, signs, places)

    after = torch.full_like(before, torch.nan)
    scales, codes = encoded(encode(0, places), grad.clone(), Residual(before, after), ROWS, BLOCKS, block, bits, dtype)
    out = torch.full_like(grad, torch.nan)
    decode(scales, codes, out, places)
    codes = codes.view(ROWS * BLOCKS, -1)
    for number, (first, count) in enumerate(every(spans, stride)):
        part = slice(first, first + count)
        kept = torch.full((count,), torch.nan)
        held = Residual(before[part].clone(), kept)
        alone = encoded(encode(number * block, None), grad[part].clone(), held, 1, 1, block, bits, dtype)
        assert torch.equal(scales.view(-1)[number], alone[0][0, 0])
        assert torch.equal(codes[number], alone[1][0])
        assert torch.equal(after[part], kept)
        said = torch.full((count,), torch.nan)
        decode(*alone, said, None)
        assert torch.equal(out[part], said)


@pytest.mark.parametrize("case", ["parameters", "gaps", "turns"])
def test_a_rotation_of_blocks_in_their_places_is_undone(case):
    block, spans, stride, size = SPANS[case]
    values, places = numbers(size, torch.float32), places_of(spans, stride)
    turned = values.clone()
    kernels.rotate_blocks(turned, signs_of(block), False, places)
    for first, count in every(spans, stride):
        alone = values[first : first + count].clone()
        kernels.rotate_blocks(alone, signs_of(block))
        assert torch.equal(turned[first : first + count], alone)
    kernels.rotate_blocks(turned, signs_of(block), True, places)
    assert torch.allclose(turned, values, atol=1e-6)


def test_a_table_that_does_not_fit_is_refused():
    table = torch.zeros(3, 2, dtype=torch.int64)
    for wrong, blocks, words in (
        (table.int(), 3, "int64"),
        (table[:, :1], 3, "int64"),
        (table, 4, "3 blocks does not"),
    ):
        with pytest.raises(ValueError, match=words):
            Places(wrong, blocks)
