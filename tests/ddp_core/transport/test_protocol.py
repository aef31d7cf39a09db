"""What a transport around another one leaves to it, and what not."""

from types import SimpleNamespace

import torch

from gradwire.compress import Ranks
from gradwire.ddp_core import Link, Paced

from ...faulty import Throughout

WITH_MEMORY = SimpleNamespace(
    group=None,
    ranks=Ranks(2),
    allocates=True,
    allocate=lambda buckets: [torch.zeros(3) for _ in buckets],
    allocate_for=torch.clone,
)


def test_nothing_lies_in_memory_where_a_decorator_would_not_see_it_go():
    paced = Paced(WITH_MEMORY, Link(1e6))
    assert paced.ranks == Ranks(2)
    assert not paced.allocates
    assert list(paced.allocate([[torch.ones(3)]])) == [None]
    assert paced.allocate_for(torch.ones(3)) is None


def test_a_decorator_may_say_that_it_takes_part():
    around = Throughout(WITH_MEMORY)
    assert around.allocates
    assert torch.equal(around.allocate([[torch.ones(3)]])[0], torch.zeros(3))
