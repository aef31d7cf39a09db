"""The native casts on every instruction set, against torch, and many gradients gathered into one buffer."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import native

from ..gpu.cases import GRADS, NAN, numbers, same
from .native_given import LARGE, SIZES, native_of, needs_native, unaligned

pytestmark = needs_native


def every_half(dtype):
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


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
    for start in (0, 1, 3):
        out, expected = torch.full((LARGE + start,), NAN)[start:], torch.empty(LARGE)
        kernels.cast_scaled(source, out, 0.3)
        kernels.cast_scaled.reference(source, expected, 0.3)
        assert same(out, expected)


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
    monkeypatch.setattr(native.operations, "library", Blind)
    out, sources = torch.zeros(20_006), [torch.randn(20_000), torch.randn(2, 3)]
    native_of(kernels.gather_scaled)(out, sources, [6, 0], scale)
    assert torch.equal(out, torch.cat([sources[1].view(-1) * scale, sources[0] * scale]))
    with pytest.raises(ValueError, match="inside, and apart"):
        native_of(kernels.gather_scaled)(out, sources, [0, 0], scale)


@pytest.mark.parametrize(
    ("sources", "words"), [(2, "at 0 to 4, 3 to 7: inside, and apart"), (1, "there are 1 sources and 2 places")]
)
def test_gradients_that_would_overlap_or_have_no_place_are_refused(sources, words):
    with pytest.raises(ValueError, match=words):
        native_of(kernels.gather_scaled)(torch.ones(16), [torch.ones(4)] * sources, [0, 3], 1.0)
