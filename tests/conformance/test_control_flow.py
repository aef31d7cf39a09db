"""Models that use other parameters from step to step or from rank to rank: gradients and errors as torch's."""

import pytest
import torch
from torch import nn

from .both import assert_all_same, assert_same, batches, both, error_of, seeded


class Branches(nn.Module):
    """The second layer is used where the input says so."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x, both):
        hidden = self.first(x).relu()
        return self.second(hidden) if both else hidden


class Outputs(nn.Module):
    """Two outputs, of which a loss may leave one out."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return {"predictions": (self.a(x), self.b(x))}


class Nested(nn.Module):
    """Unused parameters deep inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        self.embedding = nn.Embedding(5, 4)

    def forward(self, x):
        return self.inner["used"](x)


def gradients(model):
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def branching(rank, world_size, ddp, case):
    where, options = case
    model = ddp(seeded(Branches), find_unused_parameters=True, **options)
    seen = []
    for step, each in enumerate(batches(rank, 6, 3, 4)):
        model.zero_grad()
        used = step % 2 == 1 if where == "alike" else step % 2 == 1 and rank == 1
        model(each, used).sum().backward()
        seen.append((gradients(model), model.reducer._get_local_used_map().tolist()))
    return seen


def test_control_flow_on_all_ranks_or_on_one(ranks):
    settings = [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-5}]
    cases = [(where, options) for where in ("alike", "on rank 1") for options in settings]
    ours = assert_all_same(ranks, branching, cases)
    for where, options in cases:
        seen = ours[str((where, options))][0]
        assert [used for _, used in seen][:2] == [[2, 0], [2, 2 if where == "alike" else 1]]


def unfinished(rank, world_size, ddp, net):
    model = ddp(seeded(net))
    first, second = batches(rank, 2, 3, 4)
    more = (False,) if net is Branches else ()
    model(first, *more).sum().backward()
    kind, text = error_of(model, second, *more)
    logged = model._get_ddp_logging_data()
    return kind, text, logged["has_error"], logged["error"]


@pytest.mark.parametrize("net", [Branches, Nested])
def test_unused_parameters_are_an_error_at_the_next_forward(ranks, net):
    theirs, ours = both(ranks, unfinished, net)
    for rank, ((kind, text, *_), (our_kind, our_text, has_error, logged)) in enumerate(zip(theirs, ours, strict=True)):
        assert kind == our_kind == "RuntimeError"
        indices = f"Parameter indices which did not receive grad for rank {rank}: "
        prior = "Expected to have finished reduction in the prior iteration"
        for part in (prior, "find_unused_parameters=True", indices):
            assert part in text
            assert part in our_text
        assert indices + ("1" if net is Branches else "2 3 4") in our_text
        assert ("second.weight" if net is Branches else "inner.unused.weight, inner.unused.bias") in our_text
        assert (has_error, logged) == (1, our_text)


def one_output(rank, world_size, ddp, options):
    model = ddp(seeded(Outputs), find_unused_parameters=True, **options)
    seen = []
    for step, each in enumerate(batches(rank, 4, 3, 4)):
        a, b = model(each)["predictions"]
        (b if step < 2 else a + b).sum().backward()
        seen.append(gradients(model))
    return seen


def test_gradients_of_outputs_that_no_loss_uses_stay_none(ranks):
    ours = assert_all_same(ranks, one_output, [{}, {"gradient_as_bucket_view": True}])
    assert ours["{}"][0][1][0] is None


def skipped(rank, world_size, ddp, skip):
    options = {"find_unused_parameters": True, "skip_all_reduce_unused_params": skip, "bucket_cap_mb": 1e-5}
    model = ddp(seeded(Branches), **options)
    for each in batches(rank, 4, 3, 4):
        model(each, False).sum().backward()
    return gradients(model), model._get_ddp_logging_data()["num_buckets_reduced"]


def test_buckets_of_unused_parameters_are_not_sent_if_so_told(ranks):
    ours = assert_all_same(ranks, skipped, [False, True])
    assert ours["False"][0][1] == 2
    assert ours["True"][0][1] == 1


def changed_graph(rank, world_size, ddp, first, second):
    model = ddp(seeded(Branches), static_graph=True)
    one, other = batches(rank, 2, 3, 4)
    model(one, first).sum().backward()
    return error_of(lambda: model(one, second).sum().backward()) or error_of(model, other, first)


@pytest.mark.parametrize("first", [False, True])
def test_a_static_graph_that_changes_is_an_error(ranks, first):
    theirs, ours = both(ranks, changed_graph, first, not first)
    words = "Your training graph has changed in this iteration" if not first else "training graph has changed"
    for kind, text in (*theirs, *ours):
        assert kind == "RuntimeError"
        assert words in text


def too_late(rank, world_size, ddp):
    model = ddp(seeded(Outputs))
    model(batches(rank, 1, 3, 4)[0])["predictions"][0].sum()
    sum(each.sum() for each in model(batches(rank, 1, 3, 4)[0])["predictions"]).backward()
    kind, text = error_of(model._set_static_graph)
    return kind, "should be called before training loop starts" in text, "error" in model._get_ddp_logging_data()


def test_static_graph_is_set_before_training(ranks):
    theirs, ours = both(ranks, too_late)
    assert ours == theirs == [("RuntimeError", True, True)] * 2


def several_forwards(rank, world_size, ddp):
    model = ddp(seeded(lambda: nn.Linear(4, 4)), static_graph=True)
    seen = []
    for each in batches(rank, 4, 3, 4):
        model.zero_grad()
        (model(each) + model(2 * each)).square().sum().backward()
        seen.append(gradients(model))
    return seen


def test_a_static_graph_of_two_forwards(ranks):
    assert_same(ranks, several_forwards)


class Structures(nn.Module):
    """Outputs in a structure, some without a graph."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        out = self.layer(x)
        return [{"a": out, "constant": torch.ones(2)}, (out.detach(), None, "text"), {"deep": [out * 2]}]


def nested_outputs(rank, world_size, ddp, options):
    model = ddp(seeded(Structures), **options)
    seen = []
    for each in batches(rank, 4, 3, 4):
        model.zero_grad()
        first, (plain, nothing, text), last = model(each)
        assert first["constant"].grad_fn is None
        assert plain.grad_fn is nothing is None
        assert text == "text"
        loss = first["a"].sum() + last["deep"][0].sum()
        loss /= 10  # in place, on what may be a view of an output
        loss.backward()
        seen.append(gradients(model))
    return seen


def test_structures_with_tensors_of_no_graph(ranks):
    assert_all_same(ranks, nested_outputs, [{"static_graph": True}, {"find_unused_parameters": True}, {}])
