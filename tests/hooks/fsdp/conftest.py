import pytest
import torch

from gradwire.hooks.fsdp.modules import SINCE


@pytest.fixture(autouse=True)
def new_enough():
    """FSDP2 lets others communicate since then; before, gradwire says so."""
    if torch.__version__ < SINCE:  # versions, not text
        pytest.skip(f"torch {torch.__version__}, and FSDP2 takes communication of others since {SINCE}")
