"""Sites of several ranks, among which a model is sharded, replicated or wrapped in DDP."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import LocalSteps
from gradwire.compress import Layout, Ranks
from gradwire.compress.simulate import Simulation

from ...ddp_core.errors import message_of
from ...torch_versions import replicate_of_fsdp
from . import sites as of_sites
from .sites import Town

SITES = RANKS = 2
PLAIN = {"every": 3, "fragments": 2, "overlap": False, "outer": "average", "compressor": "none"}
WRAPPERS = {"ddp": DistributedDataParallel} | dict.fromkeys(("own", "overlap"), gradwire.DistributedDataParallel)
KINDS = ["fsdp", pytest.param("replicate", marks=replicate_of_fsdp)]
COMPRESSORS = ["none", "int4", "int8:error_feedback=true", "powersgd:rank=2,payload=int8"]


def mesh(sites=SITES):
    return init_device_mesh("cpu", (sites, dist.get_world_size() // sites), mesh_dim_names=("site", "rank"))


def net(seed=3):
    """A network with parameters that no number of ranks divides, a scalar, and one that is frozen.

    The first matrix is so large that PowerSGD compresses its shards.
    """
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 33), torch.nn.PReLU(), torch.nn.Linear(33, 5), torch.nn.Linear(5, 3)
    )
    model[2].weight.requires_grad_(False)
    return model.double()


def batch(rank, number):
    inputs, targets = of_sites.batch(rank, number, torch.float64)
    return inputs.repeat(1, 4), targets


def wrapped(kind, inside):
    model = net()
    if kind in WRAPPERS:
        return WRAPPERS[kind](model, process_group=inside.get_group())
    if kind == "replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate as shard
    else:
        shard = fully_shard
    for part in (model[0], model):
        shard(part, mesh=inside)
    return model


def step(model, optimizer, rank, number):
    optimizer.zero_grad()
    inputs, targets = batch(rank, number)
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def whole(model):
    """The parameters, each whole."""
    named = getattr(model, "module", model).named_parameters()
    return {name: getattr(each, "full_tensor", lambda each=each: each)().detach().clone() for name, each in named}


def built(rank, kind, sites=SITES, address=None, **options):
    """The model, its optimizer and what averages it; sites meet at an address, or are of one process group."""
    made = mesh(sites)
    model = wrapped(kind, made["rank"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "overlap":
        optimizer = gradwire.overlap(model, optimizer)
    place = {"process_group": made["site"].get_group()}
    if address is not None:
        place = {"at": Town.at(address, sites, f"site {rank // RANKS}", prefix=kind)}
    return model, optimizer, LocalSteps(model, optimizer, **place, **{**PLAIN, **options})


def trained(rank, world_size, kind, compressor="none", address=None):
    model, optimizer, local = built(rank, kind, address=address, compressor=compressor)
    order = [int(name[-1]) for name in local._rounds.sites._meeting.names]  # in which sites have come
    for number in range(7):
        step(model, optimizer, rank, number)
        if number == 4 and kind not in WRAPPERS:
            model(batch(rank, 99)[0])  # leaves the root of FSDP2 with whole parameters
    local.finish()
    return whole(model), local.round, local.history[-1].payload_bytes, order


class Shards:
    """The sites' averages of some parameters, by a compressor over equal parts of them.

    `orders`: for each part the order of the sites in which its ranks have met.
    """

    def __init__(self, compressor, orders):
        self.compressor, self.orders, self.simulations = gradwire.compressor(compressor), orders, {}

    def average(self, sites, anchors, names):
        """Move the sites' parameters of these names to their mean; `anchors` have what they were after the last one."""
        for rank, order in enumerate(self.orders):
            parts = {name: anchors[name].tensor_split(len(self.orders))[rank] for name in names}
            parts = {name: part for name, part in parts.items() if part.numel()}
            shapes = tuple(tuple(part.shape) for part in parts.values())
            layout = Layout(tuple(parts), shapes, torch.float64, torch.device("cpu"), Ranks(len(order)))
            moved = [torch.zeros(layout.numel, dtype=torch.float64) for _ in order]
            for flat, site in zip(moved, order, strict=True):
                for name, place in layout.views(flat).items():
                    trained = sites[site].get_parameter(name).detach().tensor_split(len(self.orders))[rank]
                    torch.sub(parts[name], trained, out=place)
            simulation = self.simulations.setdefault((rank, *names), Simulation(self.compressor, layout))
            mean = layout.views(simulation.step(moved)[0])
            for name, anchor in parts.items():
                anchor.sub_(mean[name])
        for site in sites:
            for name in names:
                site.get_parameter(name).detach().copy_(anchors[name])


@functools.lru_cache
def expected(compressor, orders=((0, 1),)):
    """Two sites whose ranks average gradients at each step, and which average halves of the model in turn.

    `orders`: for each part of the model that a rank averages, the order of the sites; by default sites are not sharded.
    """
    sites, shards = [net(), net()], Shards(compressor, orders)
    anchors = {name: each.detach().clone() for name, each in net().named_parameters()}
    names = [name for name, each in net().named_parameters() if each.requires_grad]
    halves = [["0.weight"], ["0.bias", "1.weight", "2.bias", "3.weight", "3.bias"]]
    assert names == halves[0] + halves[1]
    for number in range(7):
        for site, model in enumerate(sites):
            model.zero_grad()
            for rank in range(site * RANKS, site * RANKS + RANKS):
                inputs, targets = batch(rank, number)
                ((model(inputs) - targets).square().mean() / RANKS).backward()
            with torch.no_grad():
                for name in names:
                    parameter = model.get_parameter(name)
                    parameter -= 0.1 * parameter.grad
        shards.average(sites, anchors, halves[number % 2])  # every // fragments is one step
    for half in (halves[1], halves[0]):
        shards.average(sites, anchors, half)
    return anchors


def distance(found, wanted):
    """The largest difference between numbers of two models."""
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items())


def assert_as_expected(results, compressor):
    """All ranks have the model of the compressor's arithmetic on shards, which compression changes as on whole sites."""
    orders = tuple(tuple(order) for *_, order in results[:RANKS])
    unsharded = distance(expected(compressor), expected("none"))
    for found, rounds, *_ in results:
        assert rounds == 7 + 2
        assert all(torch.equal(results[0][0][name], value) for name, value in found.items())
        assert distance(found, expected(compressor, orders)) < 1e-10
        assert distance(found, expected("none")) < 1.5 * unsharded + 1e-10


@pytest.mark.parametrize("kind", WRAPPERS)
def test_ranks_of_a_site_average_gradients_at_every_step_and_sites_models_now_and_then(ranks, kind):
    assert_as_expected(ranks.run(trained, SITES * RANKS, kind), "none")


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_ranks_of_sites_average_their_parts_of_a_model(ranks, kind, compressor):
    assert_as_expected(ranks.run(trained, SITES * RANKS, kind, compressor), compressor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compressor"),
    [
        *(("fsdp", each) for each in COMPRESSORS),
        pytest.param("replicate", "none", marks=replicate_of_fsdp),
        ("ddp", "none"),
    ],
)
def test_equal_ranks_of_sites_that_meet_average_their_parts_of_a_model(ranks, kind, compressor):
    town = Town()
    results = ranks.run(trained, SITES * RANKS, kind, compressor, town.address)
    town.store.close()
    assert_as_expected(results, compressor)
    total = sum(each.numel() * each.element_size() for name, each in net().named_parameters() if name != "2.weight")
    assert sum(payload for _, _, payload, _ in results[:RANKS]) < total  # of the last half, and not once for each rank


def local(each):
    return getattr(each.detach(), "to_local", each.detach)()


def resumed(rank, world_size, kind, compressor):
    """Parameters and states of trainings that were not stopped, and that were, after five steps."""
    ends, states = [], []
    for stops in (False, True):
        model, optimizer, steps = built(rank, kind, compressor=compressor, overlap=True)
        for number in range(9):
            if number == 5 and stops:
                state = {"local": steps.state_dict(), "model": [local(each).clone() for each in model.parameters()]}
                steps.close()
                model, optimizer, steps = built(rank, kind, compressor=compressor, overlap=True)
                with torch.no_grad():
                    for each, value in zip(model.parameters(), state["model"], strict=True):
                        local(each).copy_(value)
                steps.load_state_dict(state["local"])
            step(model, optimizer, rank, number)
        states.append(steps.state_dict())
        steps.finish()
        ends.append(whole(model))
    return ends, states[0]


def enlarged(rank, world_size, kind, compressor, states):
    """Of one site of four ranks that has loaded the states of two sites of two: anchors, residuals and parameters."""
    model, _, steps = built(rank, kind, sites=1, compressor=compressor, overlap=True)
    others = message_of(steps.load_state_dict, states[rank]), message_of(steps.load_state_dict, states[1:])
    steps.load_state_dict(states)
    parts = steps._rounds.fragments
    anchors = {name: view.clone() for part in parts for name, view in part.layout.views(part.anchor).items()}
    held = {name: each for memory in steps._rounds.memories.values() for name, each in memory.held_back().items()}
    owed = {name: each.view(anchors[name].shape) for name, each in held.items()}
    steps.close()
    return anchors, owed, whole(model), others, steps.round


def joined(parts, name):
    """A parameter's numbers from those of ranks; a rank may have none."""
    return torch.cat([part[name] for part in parts if name in part])


def residuals(state):
    """What a state holds back by name: a rank's own residuals, and for all sites those of the part that it sums."""
    found = {}
    for fragment in filter(None, state["fragments"]):
        names = list(fragment["memory"])
        anchors = [state["parameters"][name]["anchor"] for name in names]
        flat = torch.cat([fragment["memory"][name]["residual"].reshape(-1) for name in names])
        places = dict(zip(names, flat.split([each.numel() for each in anchors]), strict=True))
        for name, fields in fragment["memory"].items():
            if (summed := fields.get("inner.server_residual")) is not None:
                begin = places[name].storage_offset() + int(fields["inner.server_residual.first"])
                flat[begin : begin + summed.numel()] += SITES * summed
        found |= {name: places[name].view(each.shape) for name, each in zip(names, anchors, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("compressor", ["topk:ratio=0.3", *COMPRESSORS[1:]])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_continues_a_training_exactly_also_on_another_number_of_ranks_to_a_site(ranks, kind, compressor):
    results = ranks.run(resumed, SITES * RANKS, kind, compressor)
    for (straight, stopped), _ in results:
        assert all(torch.equal(value, stopped[name]) for name, value in straight.items())
    states = [state for _, state in results]
    larger = ranks.run(enlarged, SITES * RANKS, kind, compressor, states)
    anchors = [{name: fields["anchor"] for name, fields in state["parameters"].items()} for state in states[:RANKS]]
    for name, each in net().named_parameters():
        if each.requires_grad:
            anchor = joined(anchors, name)
            assert torch.equal(joined([found for found, *_ in larger], name), anchor)
            assert torch.equal(larger[0][2][name].flatten(), anchor.flatten())
            old = [joined([residuals(state) for state in states[first : first + RANKS]], name) for first in (0, RANKS)]
            torch.testing.assert_close(joined([found for _, found, *_ in larger], name), sum(old) / SITES)
    for rank, (_, _, _, others, rounds) in enumerate(larger):
        assert rounds == states[0]["round"]
        assert f"the states are of ranks {rank % RANKS} of {RANKS} of a site, and this is rank {rank} of 4" in others[0]
        assert "give this rank's own state, or a list with the states of all ranks" in others[1]


def refused(rank, world_size, address):
    """What is said of models and groups that are refused."""

    def said(model, **place):
        return message_of(LocalSteps, model, torch.optim.SGD(model.parameters()), **place)

    flat, crossed = init_device_mesh("cpu", (world_size,)), mesh()
    hybrid, partly, sharded, empty = net(), net(), net(), torch.nn.PReLU()
    fully_shard(hybrid, mesh=crossed)
    fully_shard(partly[0], mesh=flat)
    fully_shard(sharded, mesh=flat)
    fully_shard(empty, mesh=flat)
    other = net(seed=rank // RANKS).requires_grad_()
    fully_shard(other, mesh=crossed["rank"])
    place = Town.at(address, SITES, f"site {rank // RANKS}")
    site = dist.new_subgroups(1)[0]
    return [
        said(hybrid, process_group=crossed["site"].get_group()),
        said(partly),
        said(sharded),
        said(empty, process_group=site, fragments=1),
        said(other, at=place),
    ]


def test_models_and_groups_that_do_not_fit_are_refused_with_what_to_do(ranks):
    town = Town()
    for messages in ranks.run(refused, SITES * RANKS, town.address):
        expected = [
            "a mesh of 2 dimensions",
            "is outside the sharded modules: call fully_shard",
            "sharded over ranks 0, 1, 2, 3, and LocalSteps would average over ranks 0, 1, 2, 3: give process_group=",
            "has nothing of fragment",
            "start all sites with one seed, or load one checkpoint",
        ]
        for words, message in zip(expected, messages, strict=True):
            assert words in message
    town.store.close()
