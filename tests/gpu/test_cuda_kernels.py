"""The CUDA kernels on a GPU, against the reference on the CPU: the same results, no waits, and graphs that replay."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import cuda

from ..residuals import in_place
from . import cases
from .cases import GRADS, HARD, numbers

pytestmark = pytest.mark.gpu
OPERATIONS = ["selection", "bases"]
BYTES_PER_ELEMENT = 8  # gradient, survivors and room for what else is there


@pytest.fixture(autouse=True)
def cuda_backend():
    backend = next(each for each in kernels.backends() if each.name == cuda.NAME)
    if not backend.available:
        pytest.skip(f"kernel backend cuda: {backend.reason}")
    with kernels.use_backend(cuda.NAME):
        yield


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("held", [False, True])
def test_the_selection_is_that_of_the_reference(kind, held):
    for size, k, length in ((1_500_003, 15_001, 1_500_003), (1_500_003, 900_000, 1_500_003), (300_000, 40, 70_001)):
        grad = HARD[kind](size).float()
        cases.check_selection("cuda", grad, torch.zeros(size) if held else None, k, length)


@pytest.mark.parametrize("grad_dtype", GRADS, ids=str)
@pytest.mark.parametrize("dtype", GRADS, ids=str)
@pytest.mark.parametrize("index", cases.INDICES, ids=str)
def test_selections_of_all_formats_are_those_of_the_reference(grad_dtype, dtype, index):
    for held in (None, numbers(200_003, seed=1)):
        cases.check_selection("cuda", numbers(200_003, grad_dtype), held, 500, 100_002, dtype, index)


def test_rows_that_are_short_or_past_the_end_are_filled_with_zeros():
    for size, k, length, rows in ((0, 3, 5, 2), (1, 3, 5, 2), (6, 5, 5, 4), (600, 20, 700, 3), (90, 2, 1, 120)):
        cases.check_selection("cuda", numbers(size), numbers(size, seed=1), k, length, rows=rows)


def test_bases_of_many_shapes_go_in_one_call_and_depend_on_their_own_matrix_alone():
    shapes = [*cases.SHAPES, (50_257, 4), (50_257, 32)]
    matrices = [torch.randn(rank, rows, generator=torch.Generator().manual_seed(rows)) for rows, rank in shapes]
    found = cases.check_bases("cuda", matrices)
    assert torch.equal(found, torch.cat([cases.check_bases("cuda", [matrix]) for matrix in matrices]))


@pytest.mark.parametrize(("rows", "rank"), [(2, 2), (9, 4), (33, 8), (32, 32), (5000, 3), (5000, 20)])
def test_hard_matrices_beside_each_other_all_get_bases(rows, rank):
    cases.check_bases("cuda", list(cases.hard_matrices(rows, rank).values()))


def test_a_factor_that_is_not_finite_becomes_nan_and_no_other_does():
    matrices = [cases.conditioned(3000, 4, 10.0) for _ in range(3)]
    matrices[1][2, 2999] = torch.nan
    factors = cases.factors_of([(3000, 4)] * 3)
    p = torch.cat([matrix.reshape(-1) for matrix in matrices]).cuda()
    kernels.orthogonalize(p, factors)
    assert [view.isnan().all().item() for view in factors.left(p)] == [False, True, False]


def test_bases_of_higher_ranks_are_triton_s():
    pytest.importorskip("triton")
    factors, found = cases.factors_of([(3000, 40)]), numbers(3000 * 40).cuda()
    expected = found.clone()
    for backends, p in (((cuda.NAME, "triton"), found), (("triton",), expected)):
        with kernels.use_backend(*backends):
            kernels.orthogonalize(p, factors)
    assert torch.equal(found, expected)


def calls(size=100_000):
    """{operation: (tensors that it reads and writes, call)} on the GPU."""
    grad, residual = numbers(size).cuda(), numbers(size, seed=1).cuda()
    indices, values = torch.zeros(1, 999, dtype=torch.int32, device="cuda"), torch.zeros(1, 999, device="cuda")
    factors = cases.factors_of([(size // 20, 4), (100, 2)])
    p = numbers(size // 5 + 200, seed=2).cuda()
    return {
        "selection": (
            (grad, residual, indices, values),
            lambda: kernels.select_largest(grad, in_place(residual), indices, values, size),
        ),
        "bases": ((p,), lambda: kernels.orthogonalize(p, factors)),
    }


@pytest.mark.parametrize("operation", OPERATIONS)
def test_results_are_the_same_every_time(operation):
    results = []
    for _ in range(3):
        tensors, call = calls()[operation]
        call()
        results.append([tensor.cpu() for tensor in tensors])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_waits_for_the_device(operation):
    _, call = calls()[operation]
    call()  # compiles, and uploads tables
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 30)
        call()
        assert not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_kernels_follow_what_is_on_torch_s_current_stream(operation):
    expected, call = calls()[operation]
    call()
    tensors, call = calls()[operation]
    saved = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 28)
        for tensor, content in zip(tensors, saved, strict=True):
            tensor.copy_(content)
        call()
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_graph_replays_on_new_numbers(operation):
    tensors, call = calls()[operation]
    fresh = [tensor.flip(-1).contiguous() for tensor in tensors]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    results = []
    for run in (graph.replay, call):
        for tensor, content in zip(tensors, fresh, strict=True):
            tensor.copy_(content)
        run()
        results.append([tensor.cpu() for tensor in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_elements_beyond_2_to_the_31_are_reached():
    size = (1 << 31) + 12_345
    if torch.cuda.mem_get_info()[0] < BYTES_PER_ELEMENT * size:
        pytest.skip("the GPU has too little free memory for more than 2^31 elements")
    grad = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([5, (1 << 31) - 1, 1 << 31, size - 1], device="cuda")
    grad[places] = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.bfloat16, device="cuda")
    indices, values = torch.zeros(1, 4, dtype=torch.int64, device="cuda"), torch.zeros(1, 4, device="cuda")
    kernels.select_largest(grad, None, indices, values, size)
    assert indices.tolist() == [places.tolist()]
    assert values.tolist() == [[1.0, -2.0, 3.0, -4.0]]
