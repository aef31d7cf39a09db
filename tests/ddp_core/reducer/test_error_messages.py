"""What users do wrong, and what goes wrong in their own code: errors that name parameters, and going on after them."""

import pytest
import torch
from torch import nn

import gradwire

from ..errors import message_of
from ..layers import CAP, Layers, expected_average, gradients_of, inputs_of
from ..nets import WIDTH, linear, same

ALL = (0, 1, 2, 3)
SMALL = {"bucket_cap_mb": CAP}


def leaves_out(rank, world_size):
    """A backward without find_unused_parameters that does not reach layer 2."""
    model = gradwire.DistributedDataParallel(Layers(), **SMALL)
    model(inputs_of(rank), (0, 1, 3)).square().sum().backward()
    with torch.no_grad():
        model(inputs_of(rank), ALL)  # an evaluation is none the worse
    messages = [message_of(model, inputs_of(rank), ALL) for _ in range(2)]
    with model.no_sync():
        messages.append(message_of(model, inputs_of(rank), ALL))
    return messages


def test_an_unfinished_reduction_names_the_parameters_without_gradient(ranks):
    for messages in ranks.run(leaves_out, 2):
        assert len(messages) == 3
        for message in messages:
            assert "Expected to have finished reduction in the prior iteration" in message
            assert "layers.2.weight" in message
            assert "layers.2.bias" in message
            assert "find_unused_parameters=True" in message


def forwards_alone(rank, world_size):
    """Forwards without backward, whose number differs between ranks, change nothing."""
    model = gradwire.DistributedDataParallel(Layers(), **SMALL, forward_sync_buffers=False)
    for _ in range(rank + 1):
        model(inputs_of(rank, 5), ALL)
    model(inputs_of(rank), ALL).square().sum().backward()
    return gradients_of(model)


def test_a_forward_without_backward_is_nothing(ranks):
    for gradients in ranks.run(forwards_alone, 2):
        torch.testing.assert_close(gradients, expected_average([ALL, ALL]))


class Fragile(Layers):
    """Raises where it is told."""

    def __init__(self):
        super().__init__()
        self.where = None

    def forward(self, inputs, used):
        if self.where == "forward":
            raise ZeroDivisionError("on purpose")
        output = super().forward(inputs, used)
        if self.where == "beginning of backward":
            output.register_hook(self._raise)
        return output

    def _raise(self, _):
        raise ZeroDivisionError("on purpose")


def survives(rank, world_size, where, options):
    """An error on all ranks before anything was sent; then a step as if it had not been."""
    model = gradwire.DistributedDataParallel(Fragile(), **SMALL, **options)
    model.module.where = where
    messages = [message_of(lambda: model(inputs_of(rank), ALL).square().sum().backward()) for _ in range(2)]
    model.module.where = None
    model.zero_grad()
    model(inputs_of(rank), ALL).square().sum().backward()
    return messages, gradients_of(model)


@pytest.mark.parametrize("where", ["forward", "beginning of backward"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_after_an_error_before_the_first_gradient_the_next_iteration_works(ranks, where, options):
    for messages, gradients in ranks.run(survives, 2, where, options):
        assert messages == ["ZeroDivisionError: on purpose"] * 2
        torch.testing.assert_close(gradients, expected_average([ALL, ALL]))


def breaks(rank, world_size, options):
    """An error in the middle of backward, on all ranks."""
    model = gradwire.DistributedDataParallel(Layers(), **SMALL, **options)
    before = [p.detach().clone() for p in model.parameters()]
    handle = model.module.layers[1].weight.register_hook(lambda _: 1 / 0)
    messages = [message_of(lambda: model(inputs_of(rank), ALL).square().sum().backward())]
    handle.remove()
    messages += [message_of(lambda: model(inputs_of(rank), ALL).square().sum().backward())]
    return messages, same(before, model.parameters())


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_after_an_error_in_the_middle_of_backward_the_next_iteration_says_why_it_cannot(ranks, options):
    for messages, unchanged in ranks.run(breaks, 2, options):
        assert messages[0].startswith("ZeroDivisionError")
        assert "Expected to have finished reduction in the prior iteration" in messages[1]
        assert "a backward that raised an error" in messages[1]
        assert unchanged


class SparseTwice(nn.Module):
    """A dense gradient of a sparse embedding."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, WIDTH, sparse=True, dtype=torch.float64)
        self.layer = linear()

    def forward(self, tokens):
        return self.layer(self.rows(tokens)) @ self.rows.weight.t()


class Functional(nn.Module):
    """A sparse gradient that no module announces."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, WIDTH))

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.table, sparse=True)


def of_two_tokens(rank, world_size, net):
    """The error of a step."""
    model = gradwire.DistributedDataParallel(net())
    return message_of(lambda: model(torch.tensor([1, 2])).sum().backward())


@pytest.mark.parametrize(("net", "words"), [(SparseTwice, ["sparse=False"]), (Functional, ["table", "nn.Embedding"])])
def test_a_gradient_that_is_sparse_or_dense_unannounced_is_refused_with_the_way_out(ranks, net, words):
    for message in ranks.run(of_two_tokens, 2, net):
        assert all(word in message for word in words)


def random_state(rank, world_size):
    """torch's random state around construction and training."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = gradwire.DistributedDataParallel(Layers(), compressor="powersgd:rank=2", find_unused_parameters=True)
    for step in range(3):
        model(inputs_of(rank, step), ALL).square().sum().backward()
    return torch.equal(before, torch.get_rng_state())


def test_the_user_s_random_state_is_not_touched(ranks):
    assert all(ranks.run(random_state, 2))


def without_grad_mode(rank, world_size):
    with torch.no_grad():
        model = gradwire.DistributedDataParallel(Layers())
    model(inputs_of(rank), ALL).square().sum().backward()
    return gradients_of(model)


def test_a_model_may_be_wrapped_inside_no_grad(ranks):
    for gradients in ranks.run(without_grad_mode, 2):
        torch.testing.assert_close(gradients, expected_average([ALL, ALL]))
