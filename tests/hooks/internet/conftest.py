"""Where the sites of a test meet."""

from ..local_sgd.conftest import places, town

__all__ = ["places", "town"]
