import importlib.util

import pytest

WHERE = "torch.distributed._composable.replicate_with_fsdp"


@pytest.fixture(autouse=True)
def new_enough():
    """torch has it since 2.9: `tests/hooks/test_older_torch.py` has what it does before."""
    if importlib.util.find_spec(WHERE) is None:
        pytest.skip("this torch has no replicate() on FSDP2's machinery")
