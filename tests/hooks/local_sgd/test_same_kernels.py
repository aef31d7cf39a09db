"""Sites of local SGD run an operation on one kernel backend, or are refused: what they have in common would drift apart."""

import pytest
import torch

from gradwire import LocalSteps, kernels
from gradwire.compress import compressor
from gradwire.compress.protocol.layout import Ranks
from gradwire.compress.simulate import operations_of
from gradwire.hooks.local_sgd import rounds

from ...ddp_core.averaging.test_same_kernels import kernels_of, native, versions_of
from .sites import Town, built, descend, together, until

SPECS = ["int4", "powersgd:rank=1,min_compression_rate=0.1"]


def trained(rank, world_size, given, spec, address=None, steps=8):
    """A site's parameters, and {operation: backend} of what the compressor needs."""
    at = address and Town.at(address, world_size, f"site {rank}", prefix=f"{spec} {given}")
    with kernels_of(given[rank]):
        model, optimizer, local = built(rank, at, compressor=spec)
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


def apart(rank, world_size, threads, address, prefix, drifts, dtype=torch.float32):
    """A site's parameters after `synchronize` at a number of threads of its own, the rounds it missed, and the warnings."""
    torch.set_num_threads(threads[rank])
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.Linear(300, 512, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    place = {} if address is None else {"at": Town.at(address, world_size, f"site {rank}", prefix=prefix)}
    spec = f"powersgd:rank={4 if dtype == torch.float64 else 40},min_compression_rate=0"
    with pytest.MonkeyPatch.context() as patch, versions_of({"torch": "2"}) as texts:
        patch.setattr(rounds, "COMPARED", 2 if drifts else 100)
        local = LocalSteps(model, optimizer, every=1, fragments=1, overlap=False, compressor=spec, **place)
        for step in range(5):
            if drifts and (rank, step) == (1, 1):
                local._parts[0].anchor += 1.0
            model(torch.randn(16, 300, generator=generator, dtype=dtype)).square().mean().backward()
            optimizer.step()
        missed = local.metrics()["missed_rounds"]
        if not drifts:
            local.synchronize()
        anchor = local._parts[0].anchor.clone()
        local.close()
    torch.set_num_threads(1)
    return anchor, missed, [text for text in texts if "round differently" in text]


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("meets", [False, True])
def test_sites_that_round_differently_have_the_same_bits_once_they_synchronize(ranks, town, meets, dtype):
    first, second = ranks.run(apart, 2, (1, 2), town.address if meets else None, f"bits {dtype}", False, dtype)
    assert torch.equal(first[0], second[0])
    assert [missed for _, missed, _ in (first, second)] == [0, 0]
    (text,) = first[2] + second[2]  # of the site that came first
    assert "threads: " in text


@pytest.mark.parametrize("threads", [(1, 2), (1, 1)])
def test_only_such_sites_compare_their_models_now_and_then(ranks, town, threads):
    first, second = ranks.run(apart, 2, threads, town.address, f"drift {threads}", True)
    differ = threads[0] != threads[1]
    assert torch.allclose(first[0], second[0]) == differ
    least, most = sorted([first[1], second[1]])  # the model of the site that came first counts
    assert least == 0
    assert (most > 0) == differ
