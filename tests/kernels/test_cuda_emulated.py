"""The CUDA kernels' logic without a GPU: an emulator of thread blocks, warps and barriers runs their sources on the CPU."""

import logging
import shutil

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import Backend, Matrix, dispatch
from gradwire.kernels.cuda import module, operations

from ..gpu import cases
from ..gpu.cases import GRADS, HARD, numbers
from . import test_bases, test_residual, test_selection
from .cuda_emulator import Emulator, build, kernels_of
from .forgetting import forget

pytestmark = pytest.mark.usefixtures("emulator")
OPERATIONS = (kernels.select_largest, kernels.orthogonalize)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("there is no g++ to compile the CUDA sources for the emulator")
    return build(tmp_path_factory.mktemp("emulator"))


def pytest_generate_tests(metafunc):
    """The last thread first too, but for the laws, which are many."""
    law = metafunc.function.__module__ != __name__
    metafunc.parametrize(
        "emulator", [False] if law else [False, True], indirect=True, ids=["in order", "reversed"][: 2 - law]
    )


@pytest.fixture
def emulator(request, libraries, monkeypatch):
    """The CUDA backend for CPU tensors; whatever it has no kernels for runs on the reference."""
    emulator = Emulator(libraries, request.param)
    monkeypatch.setattr(module, "launch", emulator.launch)
    monkeypatch.setattr(module, "processors", lambda device: 2)
    monkeypatch.setitem(dispatch._backends, "emulated", Backend("emulated", "cpu", lambda: ""))
    for operation in OPERATIONS:
        for table in (operation.implementations, operation.limits):
            monkeypatch.setitem(table, "emulated", table["cuda"])
    with kernels.use_backend("emulated", "reference"):
        yield emulator


@pytest.fixture
def backend(emulator):
    """For the laws below."""
    return "emulated"


ELSEWHERE = (  # of other operations, or slow here
    "over_voters",
    "each_row_is_selected",
    "the_matrices_of_a_residual",
    "between_matrices",
    "normalize",
)
for laws in (test_selection, test_bases, test_residual):  # which every backend keeps
    for name, law in vars(laws).items():
        if name.startswith("test_") and not any(part in name for part in ELSEWHERE):
            globals()[f"{name}_{laws.__name__.rpartition('_')[2]}"] = law


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("held", [False, True])
def test_the_selection_is_that_of_the_reference(kind, held):
    for size, k, length in ((3_001, 31, 3_001), (3_001, 2_900, 3_001), (1_500, 20, 700), (50, 1, 8)):
        grad = HARD[kind](size).float()
        cases.check_selection("cpu", grad, numbers(size, seed=1) * 0 if held else None, k, length)


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("index", cases.INDICES, ids=str)
def test_selections_of_all_formats_are_those_of_the_reference(grad_dtype, dtype, index):
    for held in (None, numbers(2_003, seed=1)):
        cases.check_selection("cpu", numbers(2_003, grad_dtype), held, 50, 1_002, dtype, index)


def test_rows_that_are_short_or_past_the_end_are_filled_with_zeros():
    for size, k, length, rows in ((0, 3, 5, 2), (1, 3, 5, 2), (6, 5, 5, 4), (600, 20, 700, 3), (9, 2, 1, 12)):
        cases.check_selection("cpu", numbers(size), numbers(size, seed=1), k, length, rows=rows)


def test_many_segments_are_added_up_in_several_turns(monkeypatch):
    monkeypatch.setattr(operations, "SMALLEST_SEGMENT", 16)
    for kind in ("few values", "mostly zero"):
        cases.check_selection("cpu", HARD[kind](20_000), None, 100, 20_000)


def test_bases_of_many_shapes_go_in_one_call_and_depend_on_their_own_matrix_alone():
    matrices = [torch.randn(rank, rows, generator=torch.Generator().manual_seed(rows)) for rows, rank in cases.SHAPES]
    found = cases.check_bases("cpu", matrices)
    alone = [cases.check_bases("cpu", [matrix]) for matrix in matrices]
    assert torch.equal(found, torch.cat(alone))


@pytest.mark.parametrize(("rows", "rank"), [(2, 2), (9, 4), (33, 8), (32, 32), (1100, 3)])
def test_hard_matrices_beside_each_other_all_get_bases(rows, rank):
    matrices = list(cases.hard_matrices(rows, rank).values())
    cases.check_bases("cpu", matrices[1::4] if rank > 16 else matrices)


def test_a_factor_that_is_not_finite_becomes_nan_and_no_other_does():
    matrices = [cases.conditioned(1100, 4, 10.0) for _ in range(3)]
    matrices[1][2, 1050] = torch.inf
    factors = cases.factors_of([(1100, 4)] * 3)
    p = torch.cat([matrix.reshape(-1) for matrix in matrices])
    kernels.orthogonalize(p, factors)
    assert [view.isnan().all().item() for view in factors.left(p)] == [False, True, False]
    assert torch.equal(*[view for view in factors.left(p) if view.isfinite().all()])


def test_a_tall_factor_is_cut_into_a_limited_number_of_chunks():
    cases.check_bases("cpu", [cases.conditioned(70_000, 2, 100.0)])


def test_every_kernel_runs(emulator):
    for number in GRADS:
        cases.check_selection("cpu", numbers(100, number), None, 3, 100)
    for rank in (1, 8, 16, 32):
        cases.check_bases("cpu", [cases.conditioned(40, rank, 2.0)])
    assert emulator.launched == {kernel for source in module.THREADS for kernel in kernels_of(source)}


def test_what_the_kernels_do_not_know_goes_to_the_reference_and_is_logged_once(caplog, emulator):
    caplog.set_level(logging.INFO)
    forget()
    for _ in range(2):
        indices, values = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 1)
        kernels.select_largest(torch.tensor([1.0, -3.0], dtype=torch.float64), None, indices, values, 2)
        kernels.orthogonalize(torch.randn(33 * 40), kernels.Factors((Matrix(0, 40, 1, 33),)))
    assert (indices.item(), values.item()) == (1, -3.0)
    assert not emulator.launched
    assert [record.getMessage() for record in caplog.records] == [
        "emulated select_largest does not know torch.float64, the backend reference runs",
        "emulated orthogonalize does not know ranks above 32, the backend reference runs",
    ]
