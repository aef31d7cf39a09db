"""What the kernels are compared on, whatever runs them: a GPU, or the emulator of one on the CPU.

Each case makes its inputs on the CPU, where the reference then works on copies of them.
"""

import numpy
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix, Residual

from ..residuals import in_place

GRADS = [torch.float32, torch.bfloat16, torch.float16]
INDICES = [torch.int32, torch.int64]
INF, NAN = torch.inf, torch.nan
EPSILON = 1.2e-7


def numbers(size, dtype=torch.float32, seed=0):
    """Numbers with a heavy tail, as gradients have."""
    first, second = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
    return (first * second.square()).to(dtype)


def unaligned(tensor, device):
    """The same numbers on a device, one element past the start of an allocation and with NaN around them."""
    return torch.cat([tensor.new_full((1,), NAN), tensor, tensor.new_full((1,), NAN)]).to(device)[1:-1]


def check_around(tensor):
    """What lies around an unaligned tensor is as it was."""
    assert tensor._base[[0, -1]].isnan().all()


def same(first, second):
    """Equal to the bit, but for the bits of NaN and the sign of zero."""
    return numpy.array_equal(first.double().numpy(), second.double().numpy(), equal_nan=True)


def residual_on(device, held, beside):
    """A residual on a device, where there is one: what is left is to be written beside what was held back, or over it."""
    if held is None:
        return None
    before = unaligned(held, device)
    return Residual(before, unaligned(torch.full_like(held, NAN), device) if beside else before)


def kept_in(residual, held):
    """What is left, on the CPU, where there is a residual; around it, and where it was read from, nothing has changed."""
    if residual is None:
        return torch.zeros(0)
    check_around(residual.before)
    check_around(residual.after)
    assert residual.before is residual.after or same(residual.before.cpu(), held)
    return residual.after.cpu()


# Vectors that make a selection hard, as functions of their size.
HARD = {
    "heavy tail": numbers,
    "mostly zero": lambda size: numbers(size) * (torch.arange(size) % 100 == 0),
    "all equal": lambda size: torch.full((size,), -0.5),
    "zero": torch.zeros,
    "zeros of both signs": lambda size: torch.zeros(size) * numbers(size),
    "rising": lambda size: torch.arange(float(size)),
    "falling": lambda size: torch.arange(float(size)).flip(0),
    "few values": lambda size: (numbers(size) * 2).round(),
    "one power of two": lambda size: 1 + torch.rand(size, generator=torch.Generator().manual_seed(0)) / 16,
    "differ in the last bits": lambda size: (torch.arange(size) % 700 + 0x3F800000).to(torch.int32).view(torch.float32),
    "denormal": lambda size: numbers(size) * 1e-42,
    "huge": lambda size: numbers(size).sign() * 3.4e38,
    "all large at the end": lambda size: numbers(size) + 1000 * (torch.arange(size) >= 199 * size // 200),
    "periodic": lambda size: (torch.arange(size) % 4096 == 0).float(),
    "not finite": lambda size: torch.where(
        torch.arange(size) % 7 == 0, NAN, torch.where(torch.arange(size) % 5 == 0, -INF, numbers(size))
    ),
}


def check_selection(device, grad, held, k, length, dtype=torch.float32, index=torch.int32, rows=None):
    """`select_largest` against the reference: indices, values and residual are the same to the bit."""
    rows = rows or -(-len(grad) // length)
    found = []
    for place, select in ((device, kernels.select_largest), ("cpu", kernels.select_largest.reference)):
        residual = residual_on(place, held, beside=select is kernels.select_largest)
        indices = torch.full((rows, k + 1), -7, dtype=index, device=place)
        values = torch.full((rows, k + 1), 7, dtype=dtype, device=place)
        select(unaligned(grad, place), residual, indices[:, :k], values[:, :k], length)
        found.append((indices.cpu(), values.cpu(), kept_in(residual, held)))
    assert torch.equal(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert same(found[0][2], found[1][2])


def check_signs(size, length, block, dtype, voters=(1, 2, 3, 8)):
    """Bits and means of so many voters are the reference's on the CPU, to the bit; scales and residuals nearly."""
    grad, rows, votes = unaligned(numbers(size, dtype), "cpu"), -(-size // length), []
    for pack in (kernels.sign_pack, kernels.sign_pack.reference):
        residual = unaligned(numbers(size, seed=1), "cpu")
        scales, bits = torch.full((rows, length // block), NAN), torch.zeros(rows, length // 8, dtype=torch.uint8)
        pack(grad, in_place(residual), scales, bits, length)
        votes.append((residual, scales, bits))
    (residual, scales, bits), expected = votes
    assert torch.equal(bits, expected[2])
    assert torch.allclose(scales, expected[1], rtol=2e-6, atol=0)
    assert torch.allclose(residual, expected[0], rtol=2e-6, atol=1e-5)
    for count in voters:
        out, mean = unaligned(torch.full((size,), NAN), "cpu"), torch.empty(size)
        payload = torch.stack([scales * (v + 1) for v in range(count)]), torch.stack([bits ^ v for v in range(count)])
        kernels.sign_unpack_mean(*payload, out)
        kernels.sign_unpack_mean.reference(*payload, mean)
        assert same(out, mean)


def quantized(quantize, grad, residual, length, block, *levels):
    """Scales and codes, in rows that hold other things too, which are left as they are."""
    rows, bits = -(-len(grad) // length), levels[0]
    scales, codes = torch.full((rows, length // block), NAN), torch.full((rows, length * bits // 8 + 4), 99).char()
    quantize(grad, residual, scales, codes[:, :-4], length, *levels)
    assert (codes[:, -4:] == 99).all()
    return scales, codes[:, :-4]


def check_quantized(size, length, block, dtype, bits, seed, voters=(1, 2, 3)):
    """Payloads, residuals and means of so many voters are the reference's on the CPU, to the bit."""
    grad, outputs = unaligned(numbers(size, dtype), "cpu"), []
    for quantize in (kernels.quantize_blocks, kernels.quantize_blocks.reference):
        residual = unaligned(numbers(size, seed=1), "cpu")
        levels = bits, None, seed, 1 << 32
        outputs.append((residual, *quantized(quantize, grad, in_place(residual), length, block, *levels)))
    assert all(same(found, expected) for found, expected in zip(*outputs, strict=True))
    _, scales, codes = outputs[0]
    for count in voters:
        out, mean = unaligned(torch.full((size,), NAN).to(dtype), "cpu"), torch.empty(size, dtype=dtype)
        votes = torch.stack([scales * (v + 1) for v in range(count)]), torch.stack([codes ^ v for v in range(count)])
        kernels.dequantize_mean(*votes, out, bits)
        kernels.dequantize_mean.reference(*votes, mean, bits)
        assert same(out, mean)


# (rows, rank): of every kernel, of several chunks, square ones.
SHAPES = [(1, 1), (3, 3), (5, 3), (1500, 4), (300, 8), (40, 13), (32, 32), (70, 17), (1025, 2), (2048, 1)]


def factors_of(shapes):
    """The places of factors of (rows, rank)."""
    return Factors(tuple(Matrix(0, rows, 1, rank) for rows, rank in shapes))


def check_bases(device, matrices):
    """`orthogonalize` of (rank, rows) matrices in one call: orthonormal, and they span what was there; in float64."""
    factors = factors_of([(matrix.shape[1], matrix.shape[0]) for matrix in matrices])
    p = unaligned(torch.cat([matrix.reshape(-1) for matrix in matrices]), device)
    kernels.orthogonalize(p, factors)
    check_around(p)
    for basis, matrix in zip(factors.left(p.cpu().double()), matrices, strict=True):
        rank, rows = basis.shape
        allowed = 4 * rows**0.5 * rank * EPSILON
        assert (basis @ basis.T - torch.eye(rank, dtype=torch.float64)).abs().max() <= allowed
        scaled = matrix.double() / matrix.double().abs().max().clamp(min=1e-300)
        assert (scaled - scaled @ basis.T @ basis).abs().max() <= 2 * allowed
    return p.cpu()


def conditioned(rows, rank, condition, seed=0):
    """A (rank, rows) matrix with singular values from 1 down to 1 / `condition`."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, rank, dtype=torch.float64, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(rank, rank, dtype=torch.float64, generator=generator)).Q
    return (left * torch.logspace(0, -numpy.log10(condition), rank, dtype=torch.float64) @ right).T.float().contiguous()


def hard_matrices(rows, rank):
    """{name: (rank, rows) matrix} that Cholesky alone cannot do, beside some that it can."""
    one = conditioned(rows, rank, 1)
    steps = torch.logspace(-38, 38, rank, dtype=torch.float64)
    with_zero, repeated, spike = one.clone(), one.clone(), torch.zeros(rank, rows)
    with_zero[rank // 2] = 0
    repeated[-1] = repeated[0]
    spike[-1, rows // 2] = 1e-45
    return {
        "zero": torch.zeros(rank, rows),
        "a zero vector": with_zero,
        "equal vectors": torch.ones(rank, rows),
        "one repeated": repeated,
        "rank one": one[:1] * torch.linspace(-1, 1, rank)[:, None],
        "one denormal element": spike,
        "the largest number": torch.full((rank, rows), 3.4e38),
        "vectors of all scales": (one.double() * steps[:, None]).float(),
        "almost equal": 1 + one * 1e-6,
        **{f"condition 1e{power}": conditioned(rows, rank, 10.0**power) for power in range(1, 9)},
    }


def check_products(factors, size):
    """The products of a step of PowerSGD on vectors of a size, against those of float64 by the reference."""
    grad, residual, q = numbers(size), numbers(size, seed=1), numbers(factors.right_offsets[-1], seed=2)
    wide, wide_grad, wide_q = residual.double(), grad.double(), q.double()
    p, wide_p = torch.full((factors.left_offsets[-1],), NAN), torch.empty(factors.left_offsets[-1]).double()
    kernels.low_rank_left(grad, in_place(residual), factors, q, p)
    kernels.low_rank_left.reference(wide_grad, in_place(wide), factors, wide_q, wide_p)
    kernels.low_rank_right(residual, factors, p, q)
    kernels.low_rank_right.reference(wide, factors, wide_p, wide_q)
    kernels.low_rank_finish(grad, residual, factors, p, q)
    kernels.low_rank_finish.reference(wide_grad, wide, factors, wide_p, wide_q)
    for found, expected in ((p, wide_p), (q, wide_q), (grad, wide_grad), (residual, wide)):
        assert (found - expected).norm() <= 2e-6 * expected.norm()
