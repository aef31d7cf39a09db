"""The native backend as a whole: instruction sets, residuals, and what is refused."""

import logging

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Block, Factors, Matrix, Rows, native

from ..residuals import in_place
from .forgetting import forget
from .native_given import LARGE, native_of, needs_native, numbers
from .test_residual import ENCODERS, WIDE, beside_and_in_place

pytestmark = needs_native


def test_the_best_level_comes_first_and_an_unknown_one_is_not_chosen():
    assert native.library().levels()[-1] == "baseline"
    assert not native.library().choose_level("mmx")


NATIVE = {name: encode for name, encode in (ENCODERS | WIDE).items() if not name.startswith("quantization")}


@pytest.mark.parametrize(("size", "offset"), [(200_003, 1), (LARGE, 0), (LARGE, 1)])
@pytest.mark.parametrize("encode", NATIVE.values(), ids=NATIVE)
def test_a_residual_written_beside_the_old_one_is_that_written_over_it(level, threads, encode, offset, size):
    if encode is NATIVE["products of rank 33"]:
        offset = 0  # these are torch's, which on some processors round by where numbers lie
    with kernels.use_backend("native", "reference"):
        found, expected = beside_and_in_place(encode, numbers(size), offset)
    assert all(map(torch.equal, found, expected))


def test_what_is_not_known_goes_to_the_reference_and_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    forget()
    out = torch.empty(3)
    for _ in range(3):
        with kernels.use_backend("native"):
            kernels.cast_scaled(torch.ones(3, dtype=torch.float64), out, 0.5)
    assert out.tolist() == [0.5] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "native cast_scaled does not know torch.float64, the backend reference runs"
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
    "mark_rows": ((X, torch.zeros(4, dtype=torch.bool), Rows((Block(0, 4, 4, 1),))), "5 rows, and 4 marks"),
    "clear_rows": ((X, torch.zeros(4, dtype=torch.bool), Rows((Block(1, 4, 4, 0),))), "rows end at element 17 of 16"),
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
