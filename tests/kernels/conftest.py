"""What the tests of the native backend share."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import native

AVAILABLE = {backend.name: backend for backend in kernels.backends()}[native.NAME].available
LEVELS = native.library().levels() if AVAILABLE else ["none"]


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set that this processor runs."""
    if not AVAILABLE:
        pytest.skip("the native extension is not built")
    before = native.library().level()
    assert native.library().choose_level(request.param)
    with kernels.use_backend("native"):
        yield request.param
    native.library().choose_level(before)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
