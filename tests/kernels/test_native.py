"""The native backend on every instruction set, against the reference: casts, signs, and what is refused."""

import logging

import numpy
import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Factors, Matrix, native

from ..residuals import in_place
from .forgetting import forget
from .native_given import GRADS, INF, NAN, SIZES, native_of, needs_native, numbers, same, unaligned
from .test_residual import ENCODERS, WIDE, beside_and_in_place

pytestmark = needs_native
LARGE = 2_200_003  # a result of so many float32 is written around the caches


def every_half(dtype):
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


def test_the_best_level_comes_first_and_an_unknown_one_is_not_chosen():
    assert native.library().levels()[-1] == "baseline"
    assert not native.library().choose_level("mmx")


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


def test_large_results_are_as_those_of_the_reference(level, threads):
    source = unaligned(numbers(LARGE))
    bits = torch.randint(0, 256, (3, 2, LARGE // 16 + 13), dtype=torch.uint8)[:, :, : (LARGE // 16 + 12) // 8 * 8]
    scales = numbers(3 * 2 * bits.shape[2] // 8).view(3, 2, -1)
    for start in (0, 1, 3):
        out, expected = torch.full((LARGE + start,), NAN)[start:], torch.empty(LARGE)
        kernels.cast_scaled(source, out, 0.3)
        kernels.cast_scaled.reference(source, expected, 0.3)
        assert same(out, expected)
        kernels.sign_unpack_mean(scales, bits, out)
        kernels.sign_unpack_mean.reference(scales, bits, expected)
        assert same(out, expected)


@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("size", [0, *SIZES])
def test_a_bad_element_is_found_wherever_it_is(level, threads, size, dtype):
    tensor = unaligned(numbers(size, dtype).clamp_(-100, 100))
    assert kernels.all_finite(tensor)
    for bad in (INF, -INF, NAN) if size else ():
        for place in (0, size // 2, size - 1):
            spoiled = tensor.clone()
            spoiled[place] = bad
            assert not kernels.all_finite(spoiled)


def test_elements_are_counted_in_64_bits():
    tensor = torch.from_numpy(numpy.zeros((1 << 31) + 77, dtype=numpy.float16))  # of zeros the system keeps one page
    tensor[-1] = INF
    assert not native_of(kernels.all_finite)(tensor)


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
        pack(grad, in_place(residual), scales, bits, length)
        votes.append((residual, scales, bits))
    (residual, scales, bits), expected = votes
    assert torch.equal(bits, expected[2])
    assert torch.allclose(scales, expected[1], rtol=2e-6, atol=0)
    assert torch.allclose(residual, expected[0], rtol=2e-6, atol=1e-5)
    for voters in (1, 2, 3, 8):
        out, mean = unaligned(torch.full((size,), NAN)), torch.empty(size)
        payload = torch.stack([scales * (v + 1) for v in range(voters)]), torch.stack([bits ^ v for v in range(voters)])
        kernels.sign_unpack_mean(*payload, out)
        kernels.sign_unpack_mean.reference(*payload, mean)
        assert same(out, mean)


@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_gradients_too_large_for_the_caches_are_gathered_by_any_number_of_threads(level, threads, dtype):
    sizes = [LARGE, 1, 77_777, LARGE]
    out = torch.full((sum(sizes) + 1,), NAN, dtype=dtype)
    sources, places = [numbers(size, dtype) for size in sizes], [1, 1 + LARGE, 2 + LARGE, 2 + LARGE + 77_777]
    kernels.gather_scaled(out, sources, places, 0.3)
    assert same(out[1:], torch.cat(sources) * 0.3)
    assert out[:1].isnan().all()


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch since 2.10 lets C++ look at tensors"
)
@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_usual_gradients_are_gathered_without_the_reference_and_no_others(dtype):
    out, usual, gather = torch.zeros(6, dtype=dtype), torch.ones(6, dtype=dtype), native.library().gather_scaled
    assert gather(out, [usual.view(2, 3)[:1], usual.view(6, 1)[:, :0], usual[3:]], [3, 6, 0], 0.5, 1) == []
    assert out.tolist() == [0.5] * 6
    subclass, other = torch.nn.Parameter(usual), torch.float16 if dtype == torch.float32 else torch.float32
    for odd in (None, 1, subclass, usual.to(other), usual.double(), usual.to("meta"), usual[::2], usual.to_sparse()):
        assert gather(out, [odd, usual[:2]], [0, 4], 1.0, 1) == [0]
        assert out.tolist() == [0.5] * 4 + [1.0] * 2
    for places in ([-1, 0], [0, 1], [1, 1], [0], [0, 6]):
        assert gather(out, [usual[:3], usual[:3]], places, 2.0, 1) == [0, 1]
    assert gather(out[::2], [usual[:3]], [0], 2.0, 1) == [0]
    assert out.tolist() == [0.5] * 4 + [1.0] * 2


class Blind:
    """The extension with a torch older than 2.10, which does not let it look at tensors."""

    @staticmethod
    def gather_scaled(out, sources, places, scale, threads):
        return list(range(len(sources)))


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_what_cannot_be_looked_at_is_gathered_by_the_reference(monkeypatch, scale):
    monkeypatch.setattr(native.streaming, "library", Blind)
    out, sources = torch.zeros(20_006), [torch.randn(20_000), torch.randn(2, 3)]
    native_of(kernels.gather_scaled)(out, sources, [6, 0], scale)
    assert torch.equal(out, torch.cat([sources[1].view(-1) * scale, sources[0] * scale]))
    with pytest.raises(ValueError, match="inside, and apart"):
        native_of(kernels.gather_scaled)(out, sources, [0, 0], scale)


def test_gradients_that_would_overlap_are_refused():
    with pytest.raises(ValueError, match="at 0 to 4, 3 to 7: inside, and apart"):
        native_of(kernels.gather_scaled)(X.clone(), [torch.ones(4)] * 2, [0, 3], 1.0)


def test_as_many_places_as_sources_are_given():
    with pytest.raises(ValueError, match="there are 1 sources and 2 places"):
        native_of(kernels.gather_scaled)(X, [torch.ones(4)], [0, 4], 1.0)


@pytest.mark.parametrize("encode", [*ENCODERS.values(), *WIDE.values()], ids=[*ENCODERS, *WIDE])
def test_a_residual_written_beside_the_old_one_is_that_written_over_it(level, threads, encode):
    with kernels.use_backend("native", "reference"):
        found, expected = beside_and_in_place(encode, numbers(200_003))
    assert all(map(torch.equal, found, expected))


def test_rows_of_a_payload_that_holds_other_things_too_are_left_as_they_are(level):
    rows = torch.full((3, 4 + 8 + 4), 7, dtype=torch.uint8)
    kernels.sign_pack(numbers(150), None, rows[:, :4].view(torch.float32), rows[:, 4:12], 64)
    assert (rows[:, 12:] == 7).all()


def test_what_is_not_known_goes_to_the_reference_and_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    forget()
    out = torch.empty(3)
    for _ in range(3):
        with kernels.use_backend("native"):
            kernels.cast_scaled(torch.ones(3, dtype=torch.float64), out, 0.5)
    assert out.tolist() == [0.5] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "native cast_scaled does not know torch.float64, the reference runs"
    ]


X, SIGNS, PLACES = torch.ones(16), torch.zeros(1, 2, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int32)
ONE, WIDE = Factors((Matrix(0, 4, 4, 1),)), Factors((Matrix(0, 2, 4, 3),))
REFUSED = {
    "cast_scaled": ((X[:8], X[4:12], 1.0), "source and out overlap"),
    "gather_scaled": (
        (X, [torch.ones(8), torch.ones(9)], [0, 8], 1.0),
        "16 elements, the sources are to lie at 0 to 8, 8 to 17",
    ),
    "sign_pack": ((X, in_place(X), torch.ones(1, 2), SIGNS, 16), "grad and residual overlap"),
    "sign_unpack_mean": ((torch.ones(1, 1, 1), SIGNS.unsqueeze(0), torch.ones(17)), "do not hold 17"),
    "select_largest": ((X, None, PLACES, torch.ones(1, 4)[:, ::2], 16), "rows of values"),
    "scatter_mean": ((PLACES[None], torch.ones(1, 1, 2), X, 0), "at least one element, got 0"),
    "low_rank_left": ((X[:15].clone(), None, ONE, X[:4].clone(), X[:4].clone()), "end at element 16"),
    "low_rank_right": ((X, ONE, torch.ones(4), torch.ones(3)), "q has 3 elements"),
    "low_rank_finish": ((X, X, ONE, torch.ones(4), torch.ones(4)), "grad and residual overlap"),
    "orthogonalize": ((torch.ones(6), WIDE), "3 vectors of 2 elements cannot be orthonormal"),
    "normalize": ((X[:4], ONE, X[:4]), "q and previous overlap"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_operation_lets_through_what_does_not_fit(name):
    arguments, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        native_of(kernels.operations()[name])(*arguments)
