"""Where the sites of a test meet."""

import pytest

from gradwire.hooks.internet.background import Background

from ..local_sgd.conftest import places, town

__all__ = ["places", "town"]


@pytest.fixture
def background():
    made = Background()
    yield made
    made.close()
