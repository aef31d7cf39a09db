import pytest
import torch

WHERE = "torch.distributed._composable.replicate_with_fsdp"


@pytest.fixture(autouse=True)
def new_enough():
    """torch has it since 2.10: `tests/hooks/test_older_torch.py` has what it does before."""
    if torch.__version__ < "2.10":  # torch.__version__ compares as a version
        pytest.skip(f"torch {torch.__version__} has no replicate() with modules of its own")
