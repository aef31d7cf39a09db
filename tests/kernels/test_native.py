"""What is particular to the native backend: instruction sets, threads, alignment, and the arguments it refuses."""

import logging

import numpy
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix, native

BACKEND = {backend.name: backend for backend in kernels.backends()}[native.NAME]
LIBRARY = native._library() if BACKEND.available else None
LEVELS = LIBRARY.levels() if LIBRARY else ["none"]
SIZES = [1, 9, 1009, 200_003]  # the last is enough work for three threads
GRADS = [torch.float32, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan

pytestmark = pytest.mark.skipif(not BACKEND.available, reason=BACKEND.reason or "it is")


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set that this processor runs."""
    before = LIBRARY.level()
    assert LIBRARY.choose_level(request.param)
    with kernels.use_backend("native"):
        yield request.param
    LIBRARY.choose_level(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(size, dtype=torch.float32, seed=0):
    """Numbers with a heavy tail, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, size, generator=generator)
    return (first * second.square()).to(dtype)


def unaligned(tensor):
    """The same numbers, one element past the start of an allocation."""
    return torch.cat([tensor.new_zeros(1), tensor])[1:]


def same(first, second):
    """Equal to the bit, but for the bits of NaN and the sign of zero."""
    return numpy.array_equal(first.double().numpy(), second.double().numpy(), equal_nan=True)


def every_half(dtype):
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def test_the_best_level_comes_first_and_an_unknown_one_is_not_chosen():
    assert LIBRARY.levels()[-1] == "baseline"
    assert not LIBRARY.choose_level("mmx")


@pytest.mark.parametrize("dtype", GRADS[1:], ids=str)
def test_all_16_bit_numbers_widen_as_torch_widens_them(level, dtype):
    out = torch.empty(1 << 16)
    kernels.cast_scaled(every_half(dtype), out, 1.0)
    assert same(out, every_half(dtype).float())


@pytest.mark.parametrize("dtype", GRADS[1:], ids=str)
def test_numbers_at_and_around_every_rounding_boundary_narrow_as_torch_narrows_them(level, dtype):
    bits = every_half(dtype).float().view(torch.int32)
    half_step = 1 << 12 if dtype == torch.float16 else 1 << 15
    source = torch.cat([bits + step for step in (0, half_step - 1, half_step, half_step + 1, -1, 1)]).view(
        torch.float32
    )
    out = torch.empty(source.shape, dtype=dtype)
    kernels.cast_scaled(source, out, 1.0)
    assert same(out, source.to(dtype))


def test_all_kinds_of_numbers_narrow_as_torch_narrows_them(level):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (100_003,), generator=generator).to(torch.int32)
    for dtype in GRADS[1:]:
        out = torch.empty(bits.shape, dtype=dtype)
        kernels.cast_scaled(bits.view(torch.float32), out, 1.0)
        assert same(out, bits.view(torch.float32).to(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_casts_are_those_of_the_reference_at_any_alignment_and_number_of_threads(level, threads, size):
    for dtype in GRADS:
        for out_dtype in GRADS:
            source, expected = unaligned(numbers(size, dtype)), torch.empty(size, dtype=out_dtype)
            out = unaligned(expected.clone())
            kernels.cast_scaled(source, out, 0.3)
            kernels.cast_scaled.reference(source, expected, 0.3)
            assert same(out, expected)


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("block", [24, 1024])
@pytest.mark.parametrize("size", SIZES)
def test_signs_are_those_of_the_reference_and_the_mean_is_to_the_bit(level, threads, size, block, grad_dtype):
    length = -(-size // block // 2) * block or block
    grad, votes = unaligned(numbers(size, grad_dtype)), []
    rows = -(-size // length)
    for pack in (kernels.sign_pack, kernels.sign_pack.reference):
        residual = unaligned(numbers(size, seed=1))
        scales, bits = torch.full((rows, length // block), NAN), torch.zeros(rows, length // 8, dtype=torch.uint8)
        pack(grad, residual, scales, bits, length)
        votes.append((residual, scales, bits))
    (residual, scales, bits), expected = votes
    assert torch.equal(bits, expected[2])
    assert torch.allclose(scales, expected[1], rtol=2e-6, atol=0)
    assert torch.allclose(residual, expected[0], rtol=2e-6, atol=1e-5)
    for voters in (1, 2, 3):
        out, mean = unaligned(torch.full((size,), NAN)), torch.empty(size)
        payload = torch.stack([scales * (v + 1) for v in range(voters)]), torch.stack([bits ^ v for v in range(voters)])
        kernels.sign_unpack_mean(*payload, out)
        kernels.sign_unpack_mean.reference(*payload, mean)
        assert same(out, mean)


HARD_TO_SELECT_FROM = {
    "heavy tail": numbers(200_003),
    "mostly zero": numbers(200_003).mul_((torch.arange(200_003) % 1000 == 0).float()),
    "all equal": torch.full((200_003,), -0.5),
    "zero": torch.zeros(200_003),
    "rising": torch.arange(200_003.0),
    "falling": torch.arange(200_003.0).flip(0),
    "few values": numbers(200_003).mul_(2).round_(),
    "all large at the end": torch.cat([numbers(199_000), numbers(1_003).add_(1000)]),
    "not finite": torch.where(
        torch.arange(200_003) % 7 == 0, NAN, torch.where(torch.arange(200_003) % 5 == 0, INF, 1.0)
    ),
    "periodic": torch.arange(200_003) % 4096 == 0,
}


@pytest.mark.parametrize("k", [1, 300, 3_001, 100_000, 200_002])
@pytest.mark.parametrize("kind", HARD_TO_SELECT_FROM)
def test_the_selection_is_that_of_the_reference_whatever_the_sample_said(threads, kind, k):
    grad, found = HARD_TO_SELECT_FROM[kind].float(), []
    for select in (native._select_largest, kernels.select_largest.reference):
        indices, values = torch.full((1, k), -1, dtype=torch.int32), torch.full((1, k), NAN)
        residual = torch.zeros(len(grad))
        select(grad, residual, indices, values, len(grad))
        found.append((indices, values, residual))
    assert all(map(same, *found))


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("value_dtype", GRADS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_selections_and_means_are_those_of_the_reference(level, size, value_dtype, grad_dtype):
    grad, length, k, found = unaligned(numbers(size, grad_dtype)), -(-size // 2), 50, []
    for backend in ("native", "reference"):
        residual = unaligned(numbers(size, seed=1))
        indices = torch.full((2, k), -1, dtype=torch.int64)
        values, out = torch.full((2, k), NAN, dtype=value_dtype), torch.full((size,), NAN)
        with kernels.use_backend(backend):
            kernels.select_largest(grad, residual, indices, values, length)
            kernels.scatter_mean(indices.unsqueeze(0), values.unsqueeze(0), out, length)
        found.append((indices, values, residual, out))
    assert all(map(same, *found))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 7, 8, 17, 32])
def test_products_of_all_ranks_are_those_of_float64(level, threads, rank):
    shapes = [(rank, rank), (37, 53), (130, 2500), (64, 27 + rank)]
    starts = [sum(rows * columns for rows, columns in shapes[:index]) + 1 for index in range(5)]
    factors = Factors(tuple(Matrix(at, *shape, min(rank, *shape)) for at, shape in zip(starts, shapes, strict=False)))
    grad, residual, q = numbers(starts[-1]), numbers(starts[-1], seed=1), numbers(factors.right_offsets[-1], seed=2)
    wide, wide_grad, wide_q = residual.double(), grad.double(), q.double()
    p, wide_p = torch.full((factors.left_offsets[-1],), NAN), torch.empty(factors.left_offsets[-1]).double()
    kernels.low_rank_left(grad, residual, factors, q, p)
    kernels.low_rank_left.reference(wide_grad, wide, factors, wide_q, wide_p)
    kernels.low_rank_right(residual, factors, p, q)
    kernels.low_rank_right.reference(wide, factors, wide_p, wide_q)
    kernels.low_rank_finish(grad, residual, factors, p, q)
    kernels.low_rank_finish.reference(wide_grad, wide, factors, wide_p, wide_q)
    for found, expected in ((p, wide_p), (q, wide_q), (grad, wide_grad), (residual, wide)):
        assert (found - expected).norm() <= 2e-6 * expected.norm()


def test_results_of_a_number_of_threads_are_always_the_same(threads):
    factors = Factors((Matrix(0, 500, 600, 4),))
    results = []
    for _ in range(3):
        grad, residual, q = numbers(300_000), numbers(300_000, seed=1), numbers(2400, seed=2)
        p = torch.empty(2000)
        native._low_rank_left(grad, residual, factors, q, p)
        native._low_rank_right(residual, factors, p, q)
        native._low_rank_finish(grad, residual, factors, p, q)
        results.append(torch.cat([grad, residual, p, q]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_rows_of_a_payload_that_holds_other_things_too_are_left_as_they_are(level):
    rows = torch.full((3, 4 + 8 + 4), 7, dtype=torch.uint8)
    kernels.sign_pack(numbers(150), None, rows[:, :4].view(torch.float32), rows[:, 4:12], 64)
    assert (rows[:, 12:] == 7).all()


def test_what_is_not_known_goes_to_the_reference_and_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    native._log_unknown.cache_clear()
    out = torch.empty(3)
    for _ in range(3):
        with kernels.use_backend("native"):
            kernels.cast_scaled(torch.ones(3, dtype=torch.float64), out, 0.5)
    assert out.tolist() == [0.5] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "native cast_scaled does not know torch.float64, the reference runs"
    ]


X, SIGNS, PLACES = torch.ones(16), torch.zeros(1, 2, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32)
ONE = Factors((Matrix(0, 4, 4, 1),))
REFUSED = {
    "not contiguous": (native._cast_scaled, (X[::2], X[:8].clone(), 1.0), "source is not contiguous"),
    "shapes": (native._cast_scaled, (X, X[:8], 1.0), "differ in shape"),
    "overlap": (native._cast_scaled, (X[:8], X[4:12], 1.0), "source and out overlap"),
    "same residual": (native._sign_pack, (X, X, torch.ones(1, 2), SIGNS, 16), "grad and residual overlap"),
    "short residual": (native._sign_pack, (X, X[:8].clone(), torch.ones(1, 2), SIGNS, 16), "not as long"),
    "bits": (native._sign_pack, (X, None, torch.ones(1, 2), SIGNS[:, :1], 16), "bits have the shape"),
    "few rows": (native._sign_pack, (torch.ones(17), None, torch.ones(1, 2), SIGNS, 16), "do not hold 17"),
    "block": (native._sign_pack, (X, None, torch.ones(1, 4), SIGNS, 16), "multiple of 8 elements, got 4"),
    "no blocks": (native._sign_unpack_mean, (torch.ones(1, 1, 3), SIGNS.unsqueeze(0), X), "do not divide"),
    "long out": (native._sign_unpack_mean, (torch.ones(1, 1, 1), SIGNS.unsqueeze(0), torch.ones(17)), "do not hold"),
    "k differs": (native._select_largest, (X, None, PLACES, torch.ones(1, 3), 16), "differ"),
    "rows differ": (native._select_largest, (X, None, PLACES, torch.ones(1, 2), 8), "do not hold 16"),
    "sparse rows": (native._select_largest, (X, None, PLACES, torch.ones(1, 4)[:, ::2], 16), "rows of values"),
    "past the end": (native._low_rank_right, (X[:15].clone(), ONE, X[:4].clone(), X[:4].clone()), "end at element 16"),
    "short factor": (native._low_rank_right, (X, ONE, torch.ones(4), torch.ones(3)), "q has 3 elements"),
    "other device": (native._cast_scaled, (X, X.to("meta"), 1.0), "on meta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_do_not_fit_are_refused_in_words(kind):
    function, arguments, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words):
        function(*arguments)


def test_wrong_dtypes_are_refused_in_words():
    with pytest.raises(TypeError, match=r"indices are int32 or int64, got torch\.uint8"):
        native._select_largest(X, None, PLACES.to(torch.uint8), torch.ones(1, 2), 16)
    with pytest.raises(TypeError, match=r"scales is of torch\.float32, got torch\.float64"):
        native._sign_pack(X, None, torch.ones(1, 2, dtype=torch.float64), SIGNS, 16)


def test_an_index_from_nowhere_writes_nowhere():
    out = torch.zeros(16)
    with pytest.raises(IndexError, match="-1"):
        native._scatter_mean(torch.tensor([[[-1]]]), torch.ones(1, 1, 1), out, 16)
    native._scatter_mean(torch.tensor([[[99]]]), torch.ones(1, 1, 1), out, 16)
    assert out.tolist() == [*[0.0] * 15, 1.0]
