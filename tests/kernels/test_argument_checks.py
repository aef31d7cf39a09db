"""What operations refuse, in words."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Backend, Block, Factors, Matrix, Residual, Rows, dispatch

from ..residuals import in_place

X, SCALES, BITS = torch.ones(16), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.uint8)
CODES, PLACES = BITS.view(torch.int8), torch.zeros(1, 2, dtype=torch.int32)
MARKS = torch.zeros(4, dtype=torch.bool)
ONE = Factors((Matrix(0, 4, 4, 1),))
TWO = Factors((Matrix(7, 3, 3, 1), Matrix(0, 4, 2, 1)))
HALF, LONG = X[:8].clone(), torch.ones(24)
REFUSED = {
    "not contiguous": (kernels.cast_scaled, (X[::2], HALF, 1.0), "source is not contiguous"),
    "shapes": (kernels.cast_scaled, (X, HALF, 1.0), "differ in shape"),
    "overlap": (kernels.cast_scaled, (X[:8], X[4:12], 1.0), "source and out overlap"),
    "other device": (kernels.cast_scaled, (X, X.to("meta"), 1.0), "out is on meta, source on cpu"),
    "same residual": (kernels.sign_pack, (X, in_place(X), SCALES, BITS, 16), "grad and residual overlap"),
    "short residual": (kernels.sign_pack, (X, in_place(HALF), SCALES, BITS, 16), "not as long"),
    "residual apart": (
        kernels.sign_pack,
        (X, Residual(LONG[:16], LONG[8:24]), SCALES, BITS, 16),
        r"residual\.before and residual\.after overlap",
    ),
    "grad before": (
        kernels.sign_pack,
        (X, Residual(X, LONG[:16]), SCALES, BITS, 16),
        r"grad and residual\.before overlap",
    ),
    "short before": (kernels.sign_pack, (X, Residual(LONG[:8], LONG[:16]), SCALES, BITS, 16), "not as long"),
    "bits": (kernels.sign_pack, (X, None, SCALES, BITS[:, :1], 16), "bits have the shape"),
    "few rows": (kernels.sign_pack, (torch.ones(17), None, SCALES, BITS, 16), "do not hold 17"),
    "block": (kernels.sign_pack, (X, None, torch.ones(1, 4), BITS, 16), "multiple of 8 elements, got 4"),
    "no blocks": (kernels.sign_unpack_mean, (torch.ones(1, 1, 3), BITS[None], X), "do not divide"),
    "no voters": (kernels.sign_unpack_mean, (torch.ones(0, 1, 1), BITS[None][:0], X), "no voters"),
    "long out": (kernels.sign_unpack_mean, (torch.ones(1, 1, 1), BITS[None], torch.ones(17)), "do not hold"),
    "codes": (kernels.quantize_blocks, (X, None, SCALES, CODES, 16), "codes have the shape"),
    "three bits": (kernels.quantize_blocks, (X, None, SCALES, CODES, 16, 3), "8, 4 or 2 bits"),
    "rows past the end": (kernels.mark_rows, (X, MARKS, Rows((Block(0, 3, 6, 0),))), "rows end at element 18 of 16"),
    "more rows than marks": (kernels.clear_rows, (X, MARKS, Rows((Block(0, 4, 4, 1),))), "5 rows, and 4 marks"),
    "few signs": (kernels.sign_pack, (X, None, SCALES, BITS, 16, torch.ones(16)), "8 elements, and there are 16"),
    "signs of no rotation": (
        kernels.sign_unpack_mean,
        (torch.ones(1, 1, 1), torch.zeros(1, 1, 3, dtype=torch.uint8), LONG, None, torch.ones(24)),
        "a power of two, got 24",
    ),
    "twelve signs": (kernels.rotate_blocks, (X, torch.ones(12)), "a power of two, got 12"),
    "voters differ": (kernels.sign_unpack_mean, (torch.ones(2, 1, 1), BITS[None], X), "bits of"),
    "k differs": (kernels.select_largest, (X, None, PLACES, torch.ones(1, 3), 16), "differ"),
    "rows differ": (kernels.select_largest, (X, None, PLACES, SCALES, 8), "do not hold 16"),
    "empty rows": (kernels.select_largest, (X, None, PLACES, SCALES, 0), "at least one element, got 0"),
    "sparse rows": (kernels.select_largest, (X, None, PLACES, torch.ones(1, 4)[:, ::2], 16), "rows of values"),
    "aliased out": (kernels.scatter_mean, (PLACES[None], X[None, None, :2], X, 16), "values and out overlap"),
    "past the end": (kernels.low_rank_left, (X[:15].clone(), None, ONE, X[:4].clone(), HALF), "end at element 16"),
    "short factor": (kernels.low_rank_left, (X, None, ONE, torch.ones(3), torch.ones(4)), "q has 3 elements"),
    "long rows": (kernels.select_largest, (X, None, PLACES, SCALES, 2**31 + 1), "no index of element"),
    "matrices overlap": (kernels.low_rank_left, (X, None, TWO, HALF, HALF), "the matrix before it ends at element 8"),
    "no matrix": (kernels.low_rank_left, (X, None, Factors((Matrix(0, 4, 4, 0),)), HALF, HALF), "not a matrix"),
}


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """A backend that does nothing with arguments that are right."""
    monkeypatch.setitem(dispatch._backends, "idle", Backend("idle", "cpu", lambda: ""))
    for operation in kernels.operations().values():
        monkeypatch.setattr(operation, "implementations", dict(operation.implementations))
        operation.implement("idle")(lambda *arguments: None)
    with kernels.use_backend("idle"):
        yield


@pytest.mark.parametrize("kind", REFUSED)
def test_arguments_that_do_not_fit_are_refused_in_words(kind):
    operation, arguments, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words):
        operation(*arguments)


TYPES = {
    "indices": (kernels.select_largest, (X, None, BITS, SCALES, 16), r"indices are int32 or int64, got torch\.uint8"),
    "scales": (kernels.sign_pack, (X, None, SCALES.double(), BITS, 16), r"is of torch\.float32, got torch\.float64"),
    "residual": (kernels.sign_pack, (X, LONG[:16], SCALES, BITS, 16), "a residual is a Residual, of two tensors, got"),
    "of two": (
        kernels.sign_pack,
        (X, Residual(LONG[:16], LONG[:16].double()), SCALES, BITS, 16),
        r"residual\.before is of torch\.float32, residual\.after of torch\.float64",
    ),
}


@pytest.mark.parametrize("kind", TYPES)
def test_wrong_types_are_refused_in_words(kind):
    operation, arguments, words = TYPES[kind]
    with pytest.raises(TypeError, match=words):
        operation(*arguments)


def test_two_views_of_the_same_memory_are_a_residual_in_place():
    kernels.sign_pack(X, Residual(LONG[:16], LONG[:16]), SCALES, BITS, 16)


def test_rows_inside_larger_rows_are_accepted():
    rows = torch.zeros(3, 16, dtype=torch.uint8)
    kernels.sign_pack(torch.ones(150), None, rows[:, :4].view(torch.float32), rows[:, 4:12], 64)
