import pytest
import torch


@pytest.fixture(autouse=True)
def random_state_untouched():
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(before, torch.random.get_rng_state()), "the user's random state was touched"
