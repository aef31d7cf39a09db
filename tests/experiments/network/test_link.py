import json
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradwire
from gradwire.ddp_core import Link
from gradwire.experiments.cli import main
from gradwire.experiments.network.link import links_of, over_link, parse_rate

ELEMENTS = 10_000
WIDTHS = (40, 250)  # two layers of 10,000 parameters


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
        ("12mbps", 8 * 12e6),
        ("1gibps", 8 * 2**30),
        ("500bps", 4000),
        ("9600bit", 9600),
        ("9600", 9600),
        (".5mbit", 5e5),
        ("0", 0),
    ],
)
def test_rates_are_in_the_units_of_tc(text, bits):
    assert parse_rate(text) == bits / 8


@pytest.mark.parametrize("text", ["", "fast", "100m", "100 mbit", "-1mbit", "1e6", "1mbits", "nan", "1pbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="such as 100mbit"):
        parse_rate(text)


def test_a_link_of_no_rate_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        over_link("0mbit")


def test_several_links_are_named_one_after_the_other():
    assert links_of("100mbit, none,1gbit") == ("100mbit", None, "1gbit")
    assert links_of(None) == links_of("none") == (None,)


@pytest.mark.parametrize(
    ("text", "message"), [("100mbit,none,100mbit", "twice"), ("100mbit,fast", "such as 100mbit"), ("none,0", "above 0")]
)
def test_links_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        links_of(text)


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
    """The seconds of the fastest of three steps, the gradients after them, and the bytes that the last one sent."""
    model, handle = wrapped(whose, spec, link)
    inputs = torch.full((4, WIDTHS[0]), rank + 1.0)
    step(model, inputs)  # builds buckets and groups
    step(model, inputs)
    seconds = min(step(model, inputs) for _ in range(3))
    gradients = [parameter.grad for parameter in model.parameters()]
    sent = handle.stats().last.traffic.sent_bytes
    handle.close()
    return seconds, gradients, sent


@pytest.mark.parametrize(("whose", "spec"), [("torch", "none"), ("gradwire", "none"), ("gradwire", "topk:ratio=0.25")])
def test_a_step_takes_what_the_link_needs_for_all_buckets_and_the_gradients_are_the_same(ranks, whose, spec):
    plain = ranks.run(gradients_and_seconds, 2, whose, spec, None)
    slow = ranks.run(gradients_and_seconds, 2, whose, spec, "1mbit")
    for (_, expected, sent), (seconds, gradients, sent_too) in zip(plain, slow, strict=True):
        assert sent == sent_too > 0
        assert seconds >= 8 * sent / 1e6
        assert seconds < 8 * sent / 1e6 + 0.5
        torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


def test_compare_says_everywhere_that_its_link_is_emulated(tmp_path, capsys):
    size = ["--nproc=1", "--model=mlp", "--data=digits", "--steps=2", "--eval-batches=1", "--compressors=none"]
    assert main(["compare", *size, "--link=100mbit", f"--out={tmp_path}"]) == 0
    start, *table = capsys.readouterr().out.splitlines()
    assert start.startswith("1 ranks, gloo on cpu, emulated link 100mbit")
    assert any(line.startswith("mlp") and "emulated link 100mbit" in line for line in table)
    assert json.loads((tmp_path / "results.json").read_text())["environment"]["network"] == "emulated link 100mbit"
    assert "1 ranks, gloo on cpu, emulated link 100mbit" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--link=0"], "above 0"), (["--link=1mbit", "--backend=nccl"], "use --backend gloo")]
)
def test_compare_refuses_what_cannot_be_emulated(arguments, told, capsys):
    assert main(["compare", *arguments]) == 2
    assert told in capsys.readouterr().err
