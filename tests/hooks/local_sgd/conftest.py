"""Where the sites of a test meet."""

import itertools

import pytest

from .sites import Town


@pytest.fixture(scope="module")
def town():
    made = Town()
    yield made
    made.store.close()


@pytest.fixture
def places(town, request):
    """Makes the rendezvous of a site: in a training of this test's own."""
    numbers = itertools.count()

    def made(sites, name=None, **options):
        options.setdefault("prefix", request.node.name)
        return town.meeting_place(sites, name or f"site {next(numbers)}", **options)

    return made
