"""Steps of GPUs that nobody has measured: bytes through a host's card, buckets that nothing hides, and micro-batches."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.compress import AllGather, AllReduce, AllToAll, Ranks, compressor
from gradwire.compress.protocol.card_traffic import through_card
from gradwire.compress.simulate import STEADY, requests_of
from gradwire.experiments.bucket_plan import bucket_layouts
from gradwire.experiments.ddp_step import (
    COSTS,
    GOODPUT,
    Cluster,
    Cost,
    GpuStep,
    gpt,
    layered,
    model_step,
    predicted_step,
    readiness,
)
from gradwire.experiments.sharded_step import network_seconds

H200 = Path(__file__).parents[2] / "docs" / "benchmarks" / "h200"
GPT2 = gpt(768, 12, 50_257, 1_024)
BITS4 = (4 + 16 / 64) / 8  # bytes a number at most: 4 bits, and a scale a block
FREE = Cost(0.0)


def step(computation=0.12, micro_batches=1, gradients=GPT2, tied=("wte",)):
    return GpuStep(gradients, readiness(gradients, tied=tied), computation, None, micro_batches)


def crossing(ranks, form, rings):
    """Bytes that leave the first host, where each rank gives an array of as many bytes as there are ranks, sent by sent."""
    everyone = range(ranks.world_size)
    inside = range(ranks.per_host)
    if form is AllToAll:  # a byte from each to each
        return sum(1.0 for sender in inside for other in everyone if other not in inside)
    if rings:  # each rank sends to the next one, in as many turns as others, a byte each, twice in an all-reduce
        turns = (ranks.world_size - 1) * (2 if form is AllReduce else 1)
        return turns * sum(1.0 for sender in inside if (sender + 1) % ranks.world_size not in inside)
    return 2 * (ranks.hosts - 1) / ranks.hosts * ranks.world_size  # hosts alone: a sum of all that they have


@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(4), Ranks(16, 0, 8), Ranks(12, 0, 4)])
@pytest.mark.parametrize(
    ("form", "rings"), [(AllToAll, True), (AllReduce, True), (AllReduce, False), (AllGather, True)]
)
def test_the_bytes_through_a_card_are_those_of_the_messages_that_leave_the_host(ranks, form, rings):
    payload = torch.empty(1 if form is AllGather else ranks.world_size, dtype=torch.uint8, device="meta")
    sent = form(payload).sent_bytes(ranks.world_size)
    found = sent * through_card(form, "all", ranks, rings=rings)
    assert found == pytest.approx(crossing(ranks, form, rings))


def test_what_stays_in_a_host_passes_no_card():
    assert through_card(AllReduce, "host", Ranks(16, 0, 8), rings=True) == 0
    assert through_card(AllReduce, "all", Ranks(8, 0, 8), rings=True) == 0
    assert through_card(AllToAll, "across", Ranks(16, 0, 8), rings=True) == 8


def test_two_hosts_of_eight_gpus_send_int4_once_a_rank_and_by_hosts_once():
    elements = sum(each.numel() for each in GPT2.values())
    cluster = Cluster(2, 8, 1.25e9)
    sent = {spec: predicted_step(step(), cluster, spec).card_bytes for spec in ("bf16", "int4", "hosts+int4")}
    assert sent["bf16"] == 2 * elements
    assert predicted_step(step(), Cluster(2, 8, 1.25e9, rings=True), "bf16").card_bytes == 2 * elements * 15 / 8
    assert sent["int4"] == pytest.approx((4 + 15 / 16) * BITS4 * elements, rel=0.02)  # to each elsewhere; around a ring
    assert sent["hosts+int4"] == pytest.approx(BITS4 * elements, rel=0.02)


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_a_step_that_the_network_bounds_takes_the_time_of_its_bytes(hosts):
    slow = Cluster(hosts, 1, 1e6)
    found = predicted_step(step(), slow, "bf16", cost=FREE)
    sent = 2 * (hosts - 1) / hosts * 2 * sum(each.numel() for each in GPT2.values())
    assert found.card_bytes == pytest.approx(sent)
    assert found.step == pytest.approx(sent / (GOODPUT * 1e6), rel=1e-3)


@pytest.mark.parametrize("spec", ["none", "int8", "hosts+bf16", "hosts+int8"])
@pytest.mark.parametrize("rings", [True, False])
def test_a_bus_holds_all_requests_of_ddp_as_it_does_those_of_fsdp2(spec, rings):
    cluster = Cluster(2, 8, 1.25e9, bus=1e9, rings=rings)
    layouts = bucket_layouts(GPT2, None, cluster.ranks)
    requests = [each for layout in layouts for each in requests_of(compressor(spec), layout, STEADY)]
    found = predicted_step(step(), cluster, spec, cost=FREE)
    assert found.network == pytest.approx(network_seconds(requests, cluster))
    assert found.network < found.step < found.network + 0.12


def test_an_exact_sum_inside_a_host_takes_time_where_there_is_a_bus():
    elements = sum(each.numel() for each in GPT2.values())
    free, bus = (predicted_step(step(), Cluster(2, 8, 1.25e9, rate), "hosts+int8") for rate in (float("inf"), 1e9))
    assert bus.network - free.network == pytest.approx(2 * 7 / 8 * 4 * elements / 1e9, rel=1e-3)
    assert bus.card_bytes == free.card_bytes


def test_accumulated_micro_batches_add_computation_alone():
    cluster = Cluster(2, 1, 1.25e9)
    one, four = (predicted_step(step(micro_batches=count), cluster, "bf16") for count in (1, 4))
    assert four.step - one.step == pytest.approx(3 * 0.12)
    assert four.exposed == pytest.approx(one.exposed)
    assert four.card_bytes == one.card_bytes


def test_gradients_in_16_bits_send_half_without_compression_and_as_much_as_bf16():
    narrow = {name: each.to(torch.bfloat16) for name, each in GPT2.items()}
    cluster = Cluster(2, 1, 1.25e9)
    wide = predicted_step(step(), cluster, "none").card_bytes
    for spec in ("none", "bf16"):
        assert predicted_step(step(gradients=narrow), cluster, spec).card_bytes == wide / 2


def test_encoding_takes_the_time_of_the_gpu_where_nothing_else_is_in_the_way():
    elements = sum(each.numel() for each in GPT2.values())
    found = predicted_step(step(), Cluster(1, 1, float("inf")), "int4", cost=Cost(1e-12 * 100))
    assert found.encode == pytest.approx(elements * 1e-10)
    assert found.step == pytest.approx(found.computation + found.encode)
    beside = predicted_step(step(), Cluster(1, 1, float("inf")), "int4", cost=Cost(1e-12, beside=True))
    assert beside.exposed < 1e-4


def test_launches_show_where_a_step_is_shorter_than_they_are():
    bound = GpuStep(GPT2, readiness(GPT2), 0.01, launches=0.02)
    found = predicted_step(bound, Cluster(1, 1, float("inf")), "int8", cost=Cost(0.0, 1e-3))
    buckets = round((found.host + 0.01 - 0.02) / 1e-3)
    assert buckets > 3
    assert found.step == pytest.approx(0.02 + buckets * 1e-3)
    assert predicted_step(step(), Cluster(1, 1, float("inf")), "int8").host == 0  # of unknown launches nothing is said


def test_what_compressors_cost_is_what_was_measured_on_an_h200():
    gpu, host = (json.loads((H200 / f"step-{bound}.json").read_text("utf-8"))["cases"] for bound in ("gpu", "host"))
    launches = {case["case"]: case["extra_a_bucket_s"] for case in host}
    dense = gpu[0]["median_s"]
    parameters = 2 * 50_304 * 768 + 12 * (12 * 768**2 + 13 * 768)
    for case in gpu:
        name = case["case"].removeprefix("gradwire:").removesuffix("@25")
        cost = COSTS.get(name) or COSTS.get(name.partition(":")[0])
        if case["case"].startswith("gradwire:") and name != "none":
            assert cost.encode == pytest.approx((case["times_the_first"] - 1) * dense / parameters, rel=0.02), name
            assert cost.launches == pytest.approx(launches[case["case"].replace("@25", "@1")], rel=0.02), name


def test_a_models_tied_embedding_is_ready_when_backward_ends_and_an_untied_one_takes_no_time():
    class Tied(nn.Module):
        def __init__(self, tie):
            super().__init__()
            self.wte = nn.Embedding(8, 4)
            self.layer, self.head = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
            if tie:
                self.head.weight = self.wte.weight

    tied, free = Tied(True), Tied(False)
    gradients, ready = model_step(tied, [tied.layer.weight, tied.wte.weight])
    assert list(gradients) == ["layer.weight", "wte.weight"]
    assert ready == {"layer.weight": 1.0, "wte.weight": 1.0}  # the head's product came first
    _, ready = model_step(free, [free.head.weight, free.layer.weight, free.wte.weight])
    assert ready == {"head.weight": 0.5, "layer.weight": 1.0, "wte.weight": 1.0}


@pytest.mark.parametrize("parameters", [1, 7_001, 124_000_000, 72_700_000_000])
def test_a_transformer_of_a_size_has_so_many_parameters(parameters):
    assert sum(each.numel() for each in layered(parameters).values()) == parameters


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Cluster(0, 1, 1.0), "hosts, GPUs, and rates above 0"),
        (lambda: Cluster(2, 1, 1.0, gpu="V100"), "H200, H100, A40"),
        (lambda: GpuStep(GPT2, {}, 0.0), "some seconds above 0"),
        (lambda: GpuStep(GPT2, {}, 1.0, backward=2.0), "a part of 1.0 s"),
    ],
)
def test_what_cannot_be_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()
