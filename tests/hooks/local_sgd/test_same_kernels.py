"""Sites of local SGD run an operation on one kernel backend, or are refused: what they have in common would drift apart."""

import pytest
import torch

from gradwire import LocalSteps, kernels
from gradwire.compress import compressor
from gradwire.compress.protocol.layout import Ranks
from gradwire.compress.simulate import operations_of

from ...ddp_core.averaging.test_same_kernels import kernels_of, native
from .sites import Net, Town, descend, together, until

SPECS = ["int4", "powersgd:rank=1,min_compression_rate=0.1"]


def trained(rank, world_size, given, spec, address=None, steps=8):
    """A site's parameters, and {operation: backend} of what the compressor needs."""
    model = Net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with kernels_of(given[rank]):
        place = {}
        if address is not None:
            place["at"] = Town.at(address, world_size, f"site {rank}", prefix=f"{spec} {given}")
        local = LocalSteps(model, optimizer, every=4, fragments=2, compressor=spec, **place)
        for step in range(steps):
            descend(model, optimizer, rank, step)
        local.finish()
        names = operations_of(compressor(spec), torch.float32, Ranks(world_size))
        chosen = {name: kernels.operations()[name].chosen("cpu") for name in names}
    return [parameter.detach().clone() for parameter in model.parameters()], chosen


@native
@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_automatic_choices_that_differ_fall_back_together(ranks, town, spec, meets):
    given = [None, "lacking native"]
    first, second = ranks.run(trained, 2, given, spec, town.address if meets else None)
    assert set(first[1].values()) == {"reference"}
    assert first[1] == second[1]
    assert all(map(torch.equal, first[0], second[0]))


@native
def test_requested_backends_that_differ_are_refused_on_all_ranks(ranks):
    failures = ranks.run(trained, 2, ["native", "reference"], "int4", expect_errors=True)
    for failure in failures:
        assert "the ranks were set up differently" in failure.message
        assert "rank 0 has native (by use_backend), rank 1 has reference (by use_backend)" in failure.message


@native
def test_a_site_that_requests_another_backend_than_the_others_is_refused_alone(town):
    made = [town.meeting_place(2, f"site {site}", prefix="requests") for site in range(3)]
    for at, backend in zip(made, ["native", "native", "reference"], strict=True):
        with kernels_of(backend):
            at.join("alike", {"quantize_blocks"})
    first = together(2, lambda site: made[site].meet())
    assert [meeting.ranks.world_size for meeting in first] == [2, 2]

    def meets(site):
        if site < 2:
            until(lambda: "site 2" in town.waiting("requests"))
        return made[site].meet()

    *others, last = together(3, meets)
    assert [meeting.ranks.world_size for meeting in others] == [2, 2]
    assert isinstance(last, ValueError)
    assert "kernels on native" in str(last)
    assert "kernels on reference" in str(last)
