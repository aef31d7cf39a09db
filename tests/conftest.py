import pytest
import torch

from gradwire import kernels

from .ranks import RankPool

BACKENDS = {each.name: each for each in kernels.backends() if each.device in ("cpu", "any")}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each kernel backend for CPU tensors in turn; what it does not have runs on the reference."""
    chosen = BACKENDS[request.param]
    if not chosen.available:
        pytest.skip(f"kernel backend {chosen.name}: {chosen.reason}")
    with kernels.use_backend(*dict.fromkeys((chosen.name, "reference"))):
        yield chosen.name


@pytest.fixture(scope="session")
def ranks():
    pool = RankPool()
    yield pool
    assert all(code == 0 for code in pool.close())
