import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.ddp_core import Link
from gradwire.experiments.cli import main
from gradwire.experiments.network.link import over_link, parse_rate

ELEMENTS = 10_000
WIDTHS = (40, 250)  # two layers of 10,000 parameters
LITTLE_MORE = 0.5  # seconds


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("100mbit", 100e6),
        ("1gbit", 1e9),
        ("1.5Gbit", 1.5e9),
        ("64kbit", 64e3),
        ("3tbit", 3e12),
        ("2mibit", 2 * 2**20),
        ("10kibit", 10 * 2**10),
        ("1.5 Gbit/s", 1.5e9),
        ("100 Mbit", 100e6),
        ("9600bit", 9600),
        (".5mbit", 5e5),
        ("0", 0),
    ],
)
def test_rates_are_bits_a_second(text, bits):
    assert parse_rate(text) == bits / 8


@pytest.mark.parametrize("text", ["", "fast", "100m", "-1mbit", "1e6", "1mbits", "nan", "1pbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="such as 100mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "write"),
    [
        ("10gbps", ("10gbit for bits a second", "80gbit for bytes a second")),
        ("1.5 Gb/s", ("1.5gbit for bits", "12gbit for bytes")),
        ("500bps", ("500bit for bits", "4000bit for bytes")),
        ("1gibps", ("1gibit for bits", "8gibit for bytes")),
        ("10", ("10mbit for Mbit/s", "10gbit for Gbit/s")),
        ("0.5", ("0.5mbit", "0.5gbit")),
    ],
)
@pytest.mark.parametrize("options", [["compare", "--link"], ["bench", "--link"], ["netlab", "--hosts=2", "--rate"]])
def test_a_rate_that_may_mean_two_things_is_refused_with_what_to_write(text, write, options, capsys):
    *before, last = options
    assert main([*before, f"{last}={text}"]) == 2
    told = capsys.readouterr().err
    assert repr(text) in told
    assert all(each in told for each in write)


def test_a_link_carries_one_collective_after_the_other(clock):
    link = Link(1000.0)
    assert [link.due(500.0) - clock.now for _ in range(2)] == [0.5, 1.0]


def test_a_link_does_not_save_up_what_it_did_not_carry(clock):
    link = Link(1e6)
    link.due(1.0)
    clock.sleep(0.05)
    assert link.due(1e5) == pytest.approx(clock.now + 0.1)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(*WIDTHS, bias=False), nn.Linear(*reversed(WIDTHS), bias=False))


def wrapped(whose, spec, link):
    settings = {"bucket_cap_mb": 4 * ELEMENTS / 2**20, "gradient_as_bucket_view": True}
    if whose == "torch":
        model = TorchDDP(layers(), **settings)
        return model, gradwire.attach(model, spec, transport=over_link(link))
    model = gradwire.DistributedDataParallel(layers(), compressor=spec, transport=over_link(link), **settings)
    return model, model.compression


def step(model, inputs):
    """Seconds of a step."""
    model.zero_grad()
    began = time.perf_counter()
    model(inputs).square().mean().backward()
    return time.perf_counter() - began


def gradients_and_seconds(rank, world_size, whose, spec, link):
    """The seconds of a quick step, the gradients after the first, and the bytes that it sent."""
    model, handle = wrapped(whose, spec, link)
    inputs = torch.full((4, WIDTHS[0]), rank + 1.0)
    step(model, inputs)  # builds buckets and groups
    step(model, inputs)
    seconds = torch.tensor([step(model, inputs)], dtype=torch.float64)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    sent = handle.stats().last.traffic.sent_bytes
    for _ in range(20):
        slowest = seconds.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if link is None or slowest < 8 * sent / 1e6 + LITTLE_MORE:
            break
        seconds.clamp_(max=step(model, inputs))
    handle.close()
    return seconds.item(), gradients, sent


@pytest.mark.parametrize(("whose", "spec"), [("torch", "none"), ("gradwire", "none"), ("gradwire", "topk:ratio=0.25")])
def test_a_step_takes_what_the_link_needs_for_all_buckets_and_the_gradients_are_the_same(ranks, whose, spec):
    plain = ranks.run(gradients_and_seconds, 2, whose, spec, None)
    slow = ranks.run(gradients_and_seconds, 2, whose, spec, "1mbit")
    for (_, expected, sent), (seconds, gradients, sent_too) in zip(plain, slow, strict=True):
        assert sent == sent_too > 0
        assert seconds >= 8 * sent / 1e6
        assert seconds < 8 * sent / 1e6 + LITTLE_MORE
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
