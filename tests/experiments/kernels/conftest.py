import pytest

from gradwire.experiments.kernels import race
from gradwire.experiments.kernels.heavy_tail import HeavyTail

from .given import CPU, SIZE


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Nothing here depends on cold caches."""
    monkeypatch.setattr(race, "last_level_cache", lambda: 2**16)


@pytest.fixture(scope="module")
def numbers():
    return HeavyTail(SIZE, CPU)
