"""The Triton backend on a device: as the reference on the CPU, without waits of the host, in CUDA graphs, past 2^31."""

from functools import partial

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Block, Factors, Matrix, Rows

from ..gpu.cases import numbers
from ..residuals import in_place
from .test_residual import ENCODERS, WIDE, beside_and_in_place

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
NAN = torch.nan
SIZE = 1_000_003


@pytest.fixture(autouse=True)
def triton():
    with kernels.use_backend("triton", "reference"):
        yield


def casts(device, dtype):
    source, narrow, wide = numbers(SIZE).to(device), torch.empty(SIZE, dtype=dtype, device=device), torch.empty(SIZE)
    wide, few, back = wide.to(device), torch.empty(1000, dtype=dtype, device=device), torch.empty(1000, device=device)

    def run():
        kernels.cast_scaled(source, narrow, 0.3)
        kernels.cast_scaled(narrow, wide, 3.0)
        kernels.cast_scaled(source[:1000], few, 0.3)
        kernels.cast_scaled(few, back, 1.0)

    return run, [narrow, wide, few, back]


def verdicts(device, dtype):
    tensors = [numbers(SIZE, dtype).to(device) for _ in range(2)]
    tensors[1][SIZE // 2] = torch.inf
    found = torch.empty(2, dtype=torch.bool, device=device)

    def run():
        for place, tensor in enumerate(tensors):
            found[place : place + 1].copy_(kernels.all_finite(tensor))

    return run, [found]


def rows(device, dtype):
    values, kept = numbers(SIZE, dtype).to(device), torch.ones(SIZE, dtype=dtype, device=device)
    values[: SIZE // 2] = 0
    used = torch.zeros(SIZE // 300 + 1, dtype=torch.bool, device=device)
    blocks = Rows((Block(0, SIZE // 300, 300, 0), Block(SIZE // 300 * 300, 1, SIZE % 300, SIZE // 300)))

    def run():
        kernels.mark_rows(values, used, blocks)
        kernels.clear_rows(kept, used, blocks)

    return run, [used, kept]


def turns(device, block, rotate):
    """The signs of a rotation."""
    return numbers(block, seed=2).sign().to(device) if rotate else None


def signs(device, dtype, block=1024, rotate=False):
    rows, length = 2, -(-SIZE // 2 // block) * block
    grad, residual = numbers(SIZE, dtype).to(device), numbers(SIZE, seed=1).to(device)
    middle, end = length // block * 4, length // block * 4 + length // 8
    payload = torch.zeros(rows, end + -end % 4, dtype=torch.uint8, device=device)
    scales, bits, turn = payload[:, :middle].view(torch.float32), payload[:, middle:end], turns(device, block, rotate)
    out = torch.full((SIZE,), NAN, device=device)

    def run():
        kernels.sign_pack(grad.clone(), in_place(residual), scales, bits, length, turn)
        kernels.sign_unpack_mean(torch.stack([scales, scales * 2]), torch.stack([bits, bits]), out, None, turn)

    return run, [bits, scales, residual, out]


def quantization(device, dtype, bits=8, seed=-1, rotate=False):
    rows, length = 2, -(-SIZE // 2 // 1024) * 1024
    grad, residual = numbers(SIZE, dtype).to(device), numbers(SIZE, seed=1).to(device)
    scales, turn = torch.full((rows, length // 1024), NAN, device=device), turns(device, 1024, rotate)
    codes = torch.zeros(rows, length * bits // 8, dtype=torch.int8, device=device)
    out = torch.full((SIZE,), NAN, device=device)

    def run():
        given = (scales, codes, length, bits, turn, seed, 1 << 32)
        kernels.quantize_blocks(grad.clone(), in_place(residual), *given)
        votes = (torch.stack([scales, scales * 2]), torch.stack([codes, codes]))
        kernels.dequantize_mean(*votes, out, bits, None, turn)

    return run, [codes, scales, residual, out]


def selection(device, dtype, length=SIZE, k=10_000, ties=False):
    rows = -(-SIZE // length)
    grad, residual = numbers(SIZE, dtype), numbers(SIZE, seed=1)
    if ties:
        grad, residual = grad.round(), residual.round()
    grad, residual = grad.to(device), residual.to(device)
    indices = torch.full((rows, k), -1, dtype=torch.int32, device=device)
    values, out = torch.full((rows, k), NAN, dtype=dtype, device=device), torch.full((SIZE,), NAN, device=device)

    def run():
        kernels.select_largest(grad, in_place(residual), indices, values, length)
        kernels.scatter_mean(indices[None], values[None], out, length)

    return run, [indices, values, residual, out]


def products(device, dtype, rank=4):
    shapes = [(rank, 3 * rank), (64, 27 + rank), (300, 5000), (9000, 50)]
    starts = [sum(rows * columns for rows, columns in shapes[:index]) + 1 for index in range(5)]
    factors = Factors(tuple(Matrix(at, *shape, min(rank, *shape)) for at, shape in zip(starts, shapes, strict=False)))
    grad, residual = numbers(starts[-1]).to(device), numbers(starts[-1], seed=1).to(device)
    given, generator = grad.clone(), torch.Generator().manual_seed(2)
    q = torch.randn(factors.right_offsets[-1], generator=generator).to(device)
    p = torch.full((factors.left_offsets[-1],), NAN, device=device)

    def run():
        grad.copy_(given)
        kernels.low_rank_left(grad, in_place(residual), factors, q, p)
        kernels.orthogonalize(p, factors)
        kernels.low_rank_right(residual, factors, p, q)
        kernels.low_rank_finish(grad, residual, factors, p, q)
        kernels.normalize(q, factors, None)

    return run, [grad, residual]


CASES = {
    "casts": casts,
    "verdicts": verdicts,
    "rows": rows,
    "signs": signs,
    "signs, small blocks": partial(signs, block=8),
    "signs, large blocks": partial(signs, block=100_000),
    "signs, rotated": partial(signs, rotate=True),
    "signs, small blocks rotated": partial(signs, block=8, rotate=True),
    "signs, large blocks rotated": partial(signs, block=8192, rotate=True),
    "quantization": quantization,
    "quantization, random": partial(quantization, seed=1 << 40),
    "quantization, rotated": partial(quantization, bits=4, rotate=True),
    "quantization, 2 bits rotated": partial(quantization, bits=2, rotate=True),
    **{f"quantization, {bits} bits": partial(quantization, bits=bits) for bits in (4, 2)},
    **{f"quantization, {bits} bits, random": partial(quantization, bits=bits, seed=1 << 40) for bits in (4, 2)},
    "selection": selection,
    "selection, many ties": partial(selection, ties=True),
    "selection, nearly all": partial(selection, k=SIZE - 1),
    "selection, rows": partial(selection, length=300_000),
    "selection, short rows": partial(selection, length=1000, k=5),
    **{f"products, rank {rank}": partial(products, rank=rank) for rank in (1, 2, 4, 8, 17, 32)},
}


def assert_as_the_reference(name, case, dtype, outputs):
    """After two runs: some of them change the residual that they read."""
    with kernels.use_backend("reference"):
        run, expected = case("cpu", dtype)
        run(), run()
    for found, wanted in zip(outputs, expected, strict=True):
        found, wanted = found.cpu().double(), wanted.double()
        if name.startswith(("products", "signs")):  # where the sign hangs on a rounding, a residual may differ
            assert (found - wanted).norm() <= (1e-2 if name.startswith("signs") else 1e-4) * wanted.norm()
        else:
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference_and_the_host_never_waits(name, dtype):
    run, outputs = CASES[name]("cuda", dtype)
    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_as_the_reference(name, CASES[name], dtype, outputs)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_captures_the_launches(name):
    run, outputs = CASES[name]("cuda", torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    assert_as_the_reference(name, CASES[name], torch.float32, outputs)


@pytest.mark.parametrize("name", CASES)
def test_results_are_the_same_to_the_bit_every_time(name):
    first, second = (CASES[name]("cuda", torch.float32) for _ in range(2))
    for run, _ in (first, second):
        run(), run()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("encode", [*ENCODERS.values(), *WIDE.values()], ids=[*ENCODERS, *WIDE])
def test_a_residual_written_beside_the_old_one_is_that_written_over_it(encode):
    grad = numbers(9_001).cuda()
    with torch.device("cuda"):
        found, expected = beside_and_in_place(encode, grad)
    assert all(map(torch.equal, found, expected))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 24 << 30, reason="needs 24 GiB of GPU memory"
)
def test_elements_past_two_to_the_31_are_reached():
    size = (1 << 31) + 5000
    source = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    source[-5000:] = 2.0
    out = torch.full((size,), NAN, dtype=torch.float16, device="cuda")
    kernels.cast_scaled(source, out, 0.5)
    assert (out[-5000:] == 1).all()
    assert not out[:-5000].any()
    source[-1] = torch.inf
    assert not kernels.all_finite(source)
    source[-1] = 2.0
    indices = torch.empty(1, 7, dtype=torch.int64, device="cuda")
    values = torch.empty(1, 7, device="cuda")
    kernels.select_largest(source, None, indices, values, size)
    assert indices.tolist() == [list(range(size - 5000, size - 4993))]


@pytest.mark.parametrize("scale", [1e-44, 1.0, 1e38])
def test_bases_are_orthonormal_at_any_scale_also_of_deficient_matrices(scale):
    for rows, rank, true_rank in ((1009, 16, 16), (20_000, 4, 2), (7, 7, 1), (64, 32, 0)):
        left = torch.rand(rank, max(1, true_rank), dtype=torch.float64) - 0.5
        right = torch.rand(max(1, true_rank), rows, dtype=torch.float64) - 0.5
        p = (left @ right * scale * bool(true_rank)).float().cuda().view(-1)
        kernels.orthogonalize(p, Factors((Matrix(0, rows, rows, rank),)))
        basis = p.cpu().double().view(rank, rows)
        assert (basis @ basis.T - torch.eye(rank)).abs().max() <= 4 * rows**0.5 * rank * 1.2e-7
