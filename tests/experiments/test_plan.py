import csv
import time
from pathlib import Path

import pytest
import torch
from rich.filesize import decimal

import gradwire
from gradwire.experiments.cli import main
from gradwire.experiments.sharded_step import Module
from gradwire.experiments.sharded_step import _seconds as step_of
from gradwire.experiments.workloads.models import MODELS, ModelConfig, build_model

COLUMNS = ["compressor", "payload_bytes_per_step", "sent_bytes_per_step", "compression_ratio"]
COLUMNS += ["state_bytes", "work_bytes", "bytes_per_parameter"]


def test_local_steps_spread_an_average_over_all_of_them(planned):
    flags = ("--model=mlp", "--compressors=none,int4", "--workers=4")
    every, local = planned(*flags)["rows"], planned(*flags, "--local-every=8")["rows"]
    for one, spread in zip(every, local, strict=True):
        assert spread["sent_bytes_per_step"] == one["sent_bytes_per_step"] / 8
        assert spread["payload_bytes_per_step"] == pytest.approx(one["payload_bytes_per_step"] / 8, abs=1)
        assert spread["compression_ratio"] == 8 * one["compression_ratio"]


def test_a_bus_carries_the_bytes_of_all_ranks(planned, plan):
    flags = ("--model=mlp", "--compressors=none,int4", "--workers=8")
    for bus, bytes_a_second in (("pcie4x16", 16e9 * 16 * 128 / 130 / 8), ("80gbit", 1e10)):
        for row in planned(*flags, f"--bus={bus}")["rows"]:
            assert row["network_seconds"] == pytest.approx(8 * row["sent_bytes_per_step"] / bytes_a_second, rel=1e-3)
    assert "network" in plan(*flags, "--bus=80gbit")


def test_a_model_of_70_billion_parameters_is_planned_in_seconds(planned):
    began = time.process_time()
    flags = ("--model.width=31232", "--model.layers=6", "--workers=64")
    document = planned("--model=gpt", "--compressors=none,onebit,fp16+powersgd:rank=4", *flags)
    assert time.process_time() - began < 30
    assert 69e9 < document["parameters"] < 72e9
    dense, bits, low_rank = document["rows"]
    assert dense["payload_bytes_per_step"] == 4 * document["parameters"]
    assert 30 < bits["compression_ratio"] < 32
    assert low_rank["compression_ratio"] > 1000


def test_shards_of_fsdp2_have_weights_and_gradients(planned):
    document = planned("--model=mlp", "--parallel=fsdp", "--compressors=none,bf16,int8/int4", "--workers=4")
    assert [list(row) for row in document["rows"]] == [COLUMNS] * 3
    plain, half, _ = document["rows"]
    assert half["sent_bytes_per_step"] == pytest.approx(plain["sent_bytes_per_step"] / 2, rel=1e-4)  # rows are padded
    assert [row["state_bytes"] for row in document["rows"][:2]] == [0, 0]


@pytest.mark.parametrize("name", MODELS)
def test_the_command_and_the_function_agree(planned, name):
    small = {"lstm": {"width": 8, "vocabulary": 300}, "gpt": {"width": 32, "layers": 1, "context": 16}}.get(name, {})
    flags = [f"--model.{size}={value}" for size, value in small.items()]
    (row,) = planned("--model", name, *flags, "--compressors=powersgd:rank=2", "--workers=4")["rows"]
    with torch.device("meta"):
        model = build_model(ModelConfig(name, **small))
    plan = gradwire.plan(model, "powersgd:rank=2", world_size=4)
    assert row == {column: getattr(plan, column) for column in COLUMNS}


def test_sites_get_a_plan_for_each_compressor_and_a_line_to_paste(planned, plan):
    flags = ("--model=mlp", "--sites=4", "--up=10mbit", "--down=50mbit", "--step-seconds=0.01")
    document = planned(*flags)
    assert [row["compressor"] for row in document["rows"]] == ["none", "bf16", "int8", "int4", "int2", "onebit"]
    steps = [row["every"] for row in document["rows"]]
    assert steps == sorted(steps, reverse=True)
    assert document["recommended"] in document["rows"]
    printed, chosen = plan(*flags), document["recommended"]
    assert f"every={chosen['every']}, fragments={chosen['fragments']}, compressor='{chosen['compressor']}'" in printed
    assert "With no compressor here sites compute for 95%" in plan(*flags, "--down=1kbit")


def test_the_line_to_paste_names_int2_only_if_it_was_asked_for(planned):
    flags = ("--parameters=10M", "--sites=2", "--up=10mbit", "--step-seconds=0.1")
    assert planned(*flags)["recommended"]["compressor"] == "int4"
    assert planned(*flags, "--compressors=int4,int2")["recommended"]["compressor"] == "int2"


def test_sites_of_a_model_of_72_billion_parameters_are_planned_by_their_number(planned):
    flags = ("--parameters=72.7e9", "--sites=20", "--up=110mbit", "--down=500mbit", "--step-seconds=40", "--relay")
    (row,) = planned(*flags, "--compressors=int2")["rows"]
    whole = 72.7e9 * (2 + 16 / 256) / 8  # two bits, and two bytes for each block of 256
    assert row["fragments"] * row["sent_bytes"] == pytest.approx(whole * (19 / 20 + 1 / 20), rel=0.2)
    assert (row["every"], row["fragments"], round(row["seconds"])) == (64, 4, 431)  # as the page on local SGD says


GPT2 = ("--parameters=124M", "--dtype=fp32")
HOSTS_FIRST = ["hosts+bf16", "hosts+int8", "hosts+int4"]
TIMES = ["network_seconds", "network_ratio", "saves_at_most_seconds", "step_seconds", "speed_up"]


def test_a_number_of_parameters_is_planned_without_a_model_and_without_sites(planned):
    document = planned("--parameters=124M", "--workers=2")
    assert (document["parameters"], document["world_size"]) == (124_000_000, 2)
    assert [row["compressor"] for row in document["rows"]] == ["none", "bf16", "int8", "int4"]
    assert [list(row) for row in document["rows"]] == [COLUMNS] * 4
    assert document["rows"][0]["sent_bytes_per_step"] == 4 * 124e6  # of two ranks in a ring


def test_a_slow_card_takes_the_time_of_its_bytes_and_saves_what_is_not_sent(planned):
    rows = planned(*GPT2, "--hosts=2", "--rate=1gbit", "--compressors=none,bf16,int4", "--step-seconds=0.1")["rows"]
    assert [list(row) for row in rows] == [COLUMNS + TIMES] * 3
    none, half, _ = rows
    assert none["network_seconds"] == pytest.approx(4 * 124e6 / 1.25e8 / 0.94, rel=0.01)
    assert half["saves_at_most_seconds"] == pytest.approx(none["network_seconds"] / 2)
    assert (none["saves_at_most_seconds"], none["speed_up"]) == (0, 1)
    assert all(row["network_seconds"] < row["step_seconds"] < row["network_seconds"] + 0.1 for row in rows)


def test_ranks_of_a_host_share_its_card_unless_hosts_average_first(planned):
    flags = (*GPT2, "--hosts=2", "--gpus-per-host=8", "--rate=10gbit")
    document = planned(*flags)
    seconds = {row["compressor"]: row["network_seconds"] for row in document["rows"]}
    assert list(seconds)[-3:] == HOSTS_FIRST
    assert not any("powersgd" in name for name in seconds)
    assert document["world_size"] == 16
    assert seconds["int4"] > seconds["bf16"] > 3 * seconds["hosts+int4"]
    ratios = {row["compressor"]: row["network_ratio"] for row in document["rows"]}
    assert ratios["hosts+bf16"] == pytest.approx(ratios["bf16"], rel=0.01)  # the card's bytes are the same
    assert ratios["int8"] < 1 < ratios["int4"]


@pytest.mark.slow
@pytest.mark.parametrize(("bus", "first"), [("12gbit", "int8"), ("8000gbit", "hosts+int8")])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_hosts_are_tried_first_unless_their_bus_is_slow(planned, plan, bus, first, parallel):
    flags = ("--parameters=2M", f"--parallel={parallel}", "--hosts=4", "--gpus-per-host=8", "--rate=25gbit")
    flags = (*flags, f"--bus={bus}", "--step-seconds=0.001")
    seconds = {row["compressor"]: row["step_seconds"] for row in planned(*flags)["rows"]}
    assert min([*HOSTS_FIRST[:2], "bf16", "int8"], key=seconds.get).startswith("hosts+") == first.startswith("hosts+")
    assert f'Take "{first}".' in plan(*flags)


def test_the_state_of_int4_names_the_option_for_an_adam(planned, plan):
    flags = ("--parameters=2M", "--workers=2")
    states = [
        planned(*flags, *more)["rows"][-1]["state_bytes"] for more in ((), ("--optimizer=sgd",), ("--optimizer=adamw",))
    ]
    assert states[0] == states[1] > 0 == states[2]
    assert ["keeps none: add --optimizer adamw" in plan(*flags, *more) for more in ((), ("--optimizer=adamw",))] == [
        True,
        False,
    ]


def test_shards_on_gpus_that_share_a_card_are_planned_with_hosts_that_send_once(planned):
    names = [row["compressor"] for row in planned(*GPT2, "--parallel=fsdp", "--hosts=2", "--gpus-per-host=8")["rows"]]
    assert names[-6:] == [*HOSTS_FIRST, "DDP none", "DDP hosts+bf16", "DDP hosts+int8"]
    assert not any("powersgd" in name for name in names)


def test_powersgd_of_a_large_model_is_planned_when_it_is_named_and_with_the_loss_that_was_measured(plan):
    with (Path(__file__).parents[2] / "docs/results/claims.csv").open() as file:
        losses = {row["claim"]: row for row in csv.DictReader(file)}
    measured = losses["loss powersgd:rank=32,payload=int4 AdamW"]
    assert (measured["parameters"], measured["steps"]) == ("128 M", "400")
    for parameters, warned in (("124M", True), ("19M", False)):
        printed = plan(f"--parameters={parameters}", "--compressors=powersgd:rank=4")
        assert (f"ended {float(measured['value']):.1f} % above the loss of none" in printed) == warned


FSDP = ("--parallel=fsdp", "--parameters=124M", "--hosts=4")


def test_fsdp2_sends_weights_twice_and_gradients_once_and_a_step_lasts_as_long_as_they_or_its_computation(planned):
    slow = planned(*FSDP, "--rate=1gbit", "--compressors=none,bf16,int8", "--step-seconds=0.1")["rows"][:3]
    assert [list(row) for row in slow] == [COLUMNS + TIMES] * 3
    whole = 4 * 124e6 * 3 / 4 / 1.25e8 / 0.94  # of each gather and of the reduction, on four ranks
    assert slow[0]["network_seconds"] == pytest.approx(3 * whole, rel=0.03)  # but for the root, gathered once
    assert slow[1]["saves_at_most_seconds"] == pytest.approx(slow[0]["network_seconds"] / 2, rel=1e-3)
    assert all(-1e-9 < row["step_seconds"] - row["network_seconds"] < 0.11 for row in slow)
    assert slow[0]["speed_up"] == pytest.approx(1)  # alltoall or reduce-scatter: as many bytes on hosts of one rank
    fast, *_ = planned(*FSDP, "--rate=100000gbit", "--compressors=none", "--step-seconds=0.1")["rows"]
    assert fast["step_seconds"] == pytest.approx(0.1, rel=1e-3)


def test_a_step_of_fsdp2_is_the_longest_chain_of_weights_computation_and_gradients():
    module = Module(gather=1.0, again=1.0, reduce=1.0, forward=5.0, backward=10.0, decode=0.0, encode=0.0)
    assert step_of([module], 1) == 1 + 5 + 10 + 1  # backward's gather has come while forward computed
    assert step_of([module] * 3, 1) == 1 + 3 * 5 + 3 * 10 + 1
    assert step_of([module] * 3, 2) == 1 + 2 * (3 * 5 + 3 * 10) + 1
    slow = Module(gather=5.0, again=5.0, reduce=5.0, forward=1.0, backward=2.0, decode=0.0, encode=0.0)
    assert step_of([slow] * 3, 1) == 9 * 5
    assert step_of([slow] * 3, 2) == 15 * 5  # all gathers twice


def test_under_a_policy_of_16_bits_fsdp2_without_gradwire_sends_as_much_as_bf16(planned):
    flags = ("--dtype=bf16", "--rate=10gbit", "--compressors=none,bf16,int8", "--step-seconds=0.1")
    rows = planned(*FSDP, *flags)["rows"][:3]
    assert [row["compression_ratio"] for row in rows] == pytest.approx([1, 1, 1.94], abs=0.01)
    assert [row["network_ratio"] for row in rows] == pytest.approx([1, 1, 1.94], abs=0.01)
    assert [row["speed_up"] for row in rows[:2]] == pytest.approx([1, 1], abs=0.01)
    assert rows[2]["speed_up"] > 1.5


def test_a_policy_may_send_weights_and_gradients_in_two_dtypes_and_weights_in_each_micro_batch(planned):
    flags = (*FSDP, "--rate=10gbit", "--compressors=none,int8", "--step-seconds=0.1")
    sent = {}
    for dtype, batches in (("fp32", 1), ("bf16", 1), ("bf16/fp32", 1), ("bf16/fp32", 3)):
        rows = planned(*flags, f"--dtype={dtype}", f"--micro-batches={batches}")["rows"]
        sent[dtype, batches] = rows[0]["sent_bytes_per_step"]
        assert rows[0]["speed_up"] == pytest.approx(1)  # as much as torch's
    whole, half, mixed, thrice = sent.values()
    assert whole == 2 * half
    assert mixed - half == pytest.approx(half / 3, rel=0.03)  # but for the root, gathered once
    assert thrice - mixed == pytest.approx(2 * half * 2 / 3, rel=0.03)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_muon_on_shards_sends_its_step_too_and_ddp_which_does_not_is_planned_beside_it(planned, dtype):
    flags = (*FSDP, f"--dtype={dtype}", "--rate=10gbit", "--compressors=none,int8", "--step-seconds=0.1")
    alone, both = planned(*flags), planned(*flags, "--optimizer=muon")
    whole = ["DDP none", *(["DDP int8", "DDP int4"] if dtype == "bf16" else ["DDP bf16", "DDP int8"])]
    assert [row["compressor"] for row in both["rows"]] == ["none", "int8", *whole]
    unit = 4 * 115.6e6 * 3 / 4  # of the blocks' matrices
    for without, row in zip(alone["rows"][:2], both["rows"], strict=False):
        assert row["sent_bytes_per_step"] - without["sent_bytes_per_step"] == pytest.approx(200 / 48 * unit, rel=0.02)
        assert row["step_seconds"] - without["step_seconds"] == pytest.approx(200 / 48 * unit / 1.25e9 / 0.94, rel=0.02)
    before = both["rows"][0]["sent_bytes_per_step"]
    found = [row["compression_ratio"] * row["sent_bytes_per_step"] for row in both["rows"]]
    assert found == pytest.approx([before] * 5)
    own = planned("--parameters=124M", "--hosts=4", "--compressors=int8", f"--dtype={dtype}")["rows"][0]
    ddp = next(row for row in both["rows"] if row["compressor"] == "DDP int8")
    assert ddp["sent_bytes_per_step"] == own["sent_bytes_per_step"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("optimizer", "bytes_"), [("adamw", 16), ("muon", 12), ("sgd", 12)])
def test_an_optimizer_has_memory_and_decides_on_the_residual(planned, plan, parallel, optimizer, bytes_):
    spec = {"ddp": "int4", "fsdp": "none/int4"}[parallel]
    flags = (f"--parallel={parallel}", "--parameters=124M", "--workers=4", f"--compressors={spec}")
    document = planned(*flags, f"--optimizer={optimizer}")
    assert document["whole_bytes"] == pytest.approx(bytes_ * 124e6, rel=0.03)  # AdamW has those outside of blocks
    assert (document["rows"][0]["state_bytes"] == 0) == (optimizer == "adamw")
    assert "whole_bytes" not in planned(*flags)
    printed = plan(*flags, f"--optimizer={optimizer}")
    whole = f"{document['whole_bytes'] / 1e9:.1f} GB"
    assert f"Memory of a rank before activations: {whole} with DDP or replicate()" in printed
    assert ("with FSDP2" in printed) == (parallel == "fsdp")


@pytest.mark.parametrize(
    ("dtype", "size", "where"), [("fp32", 4, "DDP or replicate()"), ("bf16", 2, "DDP and bfloat16 weights")]
)
def test_the_memory_of_ddp_is_of_the_dtype_of_its_rows_and_that_of_a_policy_of_float32(
    planned, plan, dtype, size, where
):
    flags = ("--parameters=124M", "--workers=4", "--optimizer=sgd", f"--dtype={dtype}")  # SGD has a momentum
    assert planned(*flags)["whole_bytes"] == 3 * size * 124e6
    kept = f"{where} (bytes per parameter: weights {size}.0, gradients {size}.0, sgd {size}.0)"
    assert kept in (printed := plan(*flags))
    assert ("; 1.5 GB with replicate(), which keeps float32." in printed) == (size == 2)
    assert planned(*flags, "--parallel=fsdp")["whole_bytes"] == 3 * 4 * 124e6
    words = "DDP or replicate()" if size == 4 else "replicate(), whose bytes rows of DDP have"
    assert f"{words}, with float32 weights under any policy" in (printed := plan(*flags, "--parallel=fsdp"))
    assert "; 372.0 MB with FSDP2" in printed


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("dtype", "tried"), [("fp32", ("bf16", "int8")), ("bf16", ("int8",))])
def test_the_memory_of_compression_with_muon_is_that_of_what_to_try(planned, plan, parallel, dtype, tried):
    flags = ("--parameters=124M", "--workers=4", f"--parallel={parallel}", f"--dtype={dtype}", "--optimizer=muon")
    rows = [row for row in planned(*flags)["rows"] if row["compressor"].removeprefix("DDP ") in tried]
    most = max(rows, key=lambda row: row["state_bytes"] + row["work_bytes"])
    size = decimal(most["state_bytes"] + most["work_bytes"])
    assert f"Of the compressors to try, {most['compressor']} adds the most within a step, {size}, by" in plan(*flags)


@pytest.mark.slow
def test_the_speed_up_of_fsdp2_is_over_torchs_own(planned, plan):
    flags = (*FSDP, "--gpus-per-host=8", "--rate=1gbit", "--compressors=none", "--step-seconds=0.1")
    assert planned(*flags)["rows"][0]["speed_up"] < 0.9  # exact sums of gradwire's own send more through a shared card
    assert "A speed-up of 1.00x is torch's FSDP2 without gradwire. Its step takes " in plan(*flags)
    torchs, *_ = planned(*flags[:-2], "--step-seconds=0.1")["rows"]
    assert (torchs["compressor"], torchs["speed_up"], torchs["work_bytes"]) == ("torch", 1.0, 0)


def test_two_levels_are_compared_with_two_uncompressed_levels():
    with torch.device("meta"):
        model = torch.nn.Linear(1000, 1000, bias=False)
    half, quarter = (gradwire.plan(model, f"hosts:ranks=2+{inner}", world_size=4) for inner in ("bf16", "int8"))
    assert half.compression_ratio == 2
    assert quarter.compression_ratio == pytest.approx(3.88, abs=0.01)
    assert gradwire.plan(model, "hosts:ranks=2+none", world_size=4).compression_ratio == 1


TIED = """
import torch
def build():
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 2000), torch.nn.Linear(2000, 1000, bias=False))
    model[1].weight = model[0].weight
    return model, torch.ones(1, dtype=int), None
"""


def test_a_model_of_a_file_is_planned_by_its_own_parameters_and_one_that_is_shared_counts_once(tmp_path, planned):
    (tmp_path / "mine.py").write_text(TIED)
    document = planned(f"--model={tmp_path / 'mine.py'}:build", "--compressors=none,bf16")
    assert document["parameters"] == 2_000_000
    assert [row["sent_bytes_per_step"] for row in document["rows"]] == pytest.approx([14e6, 7e6])
    assert [row["compression_ratio"] for row in document["rows"]] == [1, 2]


@pytest.mark.parametrize(("flags", "sent"), [((), 7e6), (("--dtype=fp32",), 14e6)])
def test_a_model_of_a_file_has_its_own_dtype_unless_one_is_named(flags, sent, tmp_path, planned):
    (tmp_path / "mine.py").write_text(TIED.replace("return model,", "return model.to(torch.bfloat16),"))
    row, *_ = planned(f"--model={tmp_path / 'mine.py'}:build", "--compressors=none", *flags)["rows"]
    assert row["sent_bytes_per_step"] == pytest.approx(sent)


def test_a_model_of_several_dtypes_is_planned_with_one_that_is_named(tmp_path, planned, capsys):
    untied = TIED.replace("model[1].weight = model[0].weight", "model[1].to(torch.bfloat16)")
    (tmp_path / "mine.py").write_text(untied)
    flags = (f"--model={tmp_path / 'mine.py'}:build", "--compressors=none")
    assert main(["plan", *flags]) == 2
    assert "trains parameters of bfloat16, float32: add --dtype fp32 or bf16" in capsys.readouterr().err
    assert planned(*flags, "--dtype=fp32")["parameters"] == 4_000_000
