"""The last lines of `gradwire plan`: whether to compress, with what, and what to paste."""

import re

import pytest

from gradwire.experiments.advice.candidates import ADAMW, CANDIDATES, MUON, SGD


def attach(first):
    """The line to paste of a compressor with DDP."""
    return f'handle = gradwire.attach(ddp_model, "{first}", optimizer=optimizer)'


@pytest.mark.parametrize(
    ("flags", "first", "then"),
    [
        (("--gpus-per-host=8",), "hosts+int8", '"hosts+int4"'),
        ((), "int8", '"int4"'),
        (("--gpus-per-host=8", "--dtype=bf16"), "hosts+int8", '"hosts+int4"'),
    ],
)
def test_a_plan_of_hosts_ends_with_lines_to_paste(flags, first, then, plan):
    *_, words, line, launch = plan("--parameters=1M", "--hosts=2", "--rate=10gbit", *flags).splitlines()
    assert words.startswith(f'Take "{first}". Compression pays while a step computes for less than about ')
    without = " without hosts+" * first.startswith("hosts+")
    cost = f"which can cost loss (+1.2 % with AdamW, measured{without} with at most 128 M parameters)."
    assert f" Next step: {then}, {cost}" in words
    assert line.strip() == attach(first)
    ranks = f"--nproc-per-node {8 if '--gpus-per-host=8' in flags else 1}"
    assert launch.strip().startswith(f"torchrun --nnodes 2 {ranks} --rdzv-backend c10d --rdzv-endpoint HOST:29400")


SHARDED = ("--parallel=fsdp", "--parameters=10M", "--hosts=2")
WHOLE = {
    "fp32": "ddp_model = torch.nn.parallel.DistributedDataParallel(model)  # DDP: 160.0 MB of a GPU",
    "bf16": "for each in (*layers, model): replicate(each, mesh=mesh, mp_policy=policy)  # replicate(): 160.0 MB of a GPU",
}
WHOLE["bf16/fp32"] = WHOLE["bf16"]  # of any policy, which DDP has not


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16/fp32"])
@pytest.mark.parametrize(("gpus", "level"), [(1, ""), (8, "hosts+")])
def test_a_plan_of_shards_has_a_line_for_each_memory_the_fastest_first(gpus, level, dtype, plan):
    flags = (*SHARDED, f"--gpus-per-host={gpus}", "--rate=1gbit", f"--dtype={dtype}", "--step-seconds=0.001")
    words, *lines, _ = plan(*flags).splitlines()[-7 + 2 * (gpus == 1) :]
    name, sharded = "DDP" if dtype == "fp32" else "replicate()", 80 / gpus
    assert words.startswith(f"Leave fully_shard on all ranks for {name}, if it fits: ")
    whole, attached, *hybrid, last = map(str.strip, lines)
    model = "ddp_model" if dtype == "fp32" else "model"
    assert [whole, attached] == [WHOLE[dtype], attach(f"{level}int8").replace("ddp_model", model)]
    if gpus == 8:
        mesh, compressed = hybrid
        assert mesh.endswith('mesh_dim_names=("replicate", "shard"))  # hybrid sharding: 20.0 MB of a GPU')
        assert compressed == 'handle = gradwire.attach(model, replicas="int8", optimizer=optimizer)'
    assert last == (
        f'handle = gradwire.attach(model, gather="{level}int8", reduce="{level}int8", optimizer=optimizer)'
        f"  # fully_shard on all ranks: {sharded:.1f} MB of a GPU"
    )


@pytest.mark.parametrize(
    ("seconds", "batches", "answers"),
    [
        (0.001, 1, ["DDP int8", "DDP hosts+int8"]),
        (0.02, 1, ["int8", "hosts+int8"]),
        (0.2, 1, ["torch"]),
        (0.2, 16, ["DDP none"]),  # shards send weights in each micro-batch
    ],
)
@pytest.mark.parametrize("gpus", [1, 8])
def test_a_plan_of_shards_leaves_them_where_the_rule_prefers_a_whole_model(
    gpus, seconds, batches, answers, planned, plan
):
    flags = (*SHARDED, f"--gpus-per-host={gpus}", "--rate=10gbit", "--dtype=bf16", f"--step-seconds={seconds}")
    flags += (f"--micro-batches={batches}",)
    rows = {row["compressor"]: row["speed_up"] for row in planned(*flags)["rows"]}
    answer, faster = "torch", 1.0
    for name in ("DDP none", "hosts+int8" if gpus == 8 else "int8", "DDP hosts+int8" if gpus == 8 else "DDP int8"):
        if rows[name] >= 1.1 * faster:
            answer, faster = name, rows[name]
    assert answer in answers
    printed = plan(*flags)
    assert ("Leave fully_shard" in printed) == answer.startswith("DDP")
    assert ("(*layers, model): replicate(each, mesh=mesh, mp_policy=policy)  # repl" in printed) == answer.startswith(
        "DDP"
    )
    assert ("Under FSDP2 losses were measured" in printed) == ("attach" in printed)
    assert ("attach" in printed) == (answer != "torch")


@pytest.mark.slow
def test_memory_that_is_known_leaves_out_what_does_not_fit(plan):
    flags = (*SHARDED, "--gpus-per-host=8", "--rate=1gbit", "--step-seconds=0.001")
    for memory, name in ((0.2, "DDP"), (0.1, "hybrid sharding")):
        printed = plan(*flags, f"--gpu-memory={memory}")
        assert f"all ranks for {name}, if activations fit in the rest of {memory} GB: " in printed
        assert f' {name}: Take "{"int8" if name == "hybrid sharding" else "hosts+int8"}". ' in printed
    printed = plan(*flags, "--gpu-memory=0.015")
    assert "Leave fully_shard" not in printed
    assert 'Take "hosts+int8". ' in printed


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_plan_names_the_largest_model_behind_the_loss_of_each_compressor(optimizer, plan):
    printed = plan("--parameters=1M", "--hosts=2", "--rate=10gbit", f"--optimizer={optimizer}")
    kind = {"adamw": ADAMW, "sgd": SGD, "muon": MUON}[optimizer]
    largest = {
        each.spec: f"with {kind}, measured with at most {each.largest[kind] / 1e6:.3g} M parameters"
        for each in CANDIDATES
        if each.spec in ("int8", "int4")
    }
    assert 'Take "int8". ' in printed
    assert f" Loss: no difference seen {largest['int8']}." in printed
    assert (f" {largest['int4']})." in printed) == (optimizer != "muon")  # where 4 bits are not named


@pytest.mark.parametrize("flags", [(), ("--parallel=fsdp",), ("--gpus-per-host=8",)])
def test_a_plan_of_hosts_without_a_rate_has_lines_to_paste_too(plan, flags):
    printed = plan("--parameters=1M", "--hosts=2", *flags)
    assert re.search(r'^Take "(hosts\+)?int8"\. Loss: .*int4", which can cost loss ', printed, re.MULTILINE)
    assert "attach(" in printed


def test_a_plan_of_a_network_that_is_fast_enough_says_not_to_compress(plan):
    printed = plan("--parameters=1M", "--hosts=2", "--rate=3000gbit")
    assert "Do not compress: " in printed
    assert "attach(" not in printed


def test_a_plan_has_no_limit_beyond_an_hour(plan):
    always, limit = "even if a step computes for an hour.", "while a step computes for less than about 570 s."
    for rate, said in (("1mbit", always), ("10mbit", limit)):
        assert f" Compression pays {said} " in plan("--parameters=124M", "--hosts=2", f"--rate={rate}")


@pytest.mark.parametrize("host", [("--workers=8",), ("--hosts=1", "--gpus-per-host=8")])
@pytest.mark.parametrize(("flags", "first"), [((), "int8"), (("--dtype=bf16",), "int8")])
def test_a_plan_of_one_host_with_a_bus_ends_with_lines_to_paste_too(plan, host, flags, first):
    *_, words, line, launch = plan("--parameters=1M", "--bus=91gbit", *host, *flags).splitlines()
    assert words.startswith(f'Take "{first}". ')
    assert words.endswith(" Run this; on GPUs with torch 2.15 or later, put TORCH_DIST_USE_NCCL2=0 before it:")
    assert line.strip() == attach(first)
    assert launch.strip() == "torchrun --nproc-per-node 8 train.py"


def test_one_rank_that_sends_nothing_gets_no_lines_to_paste(plan):
    assert "Take" not in plan("--parameters=1M", "--workers=1", "--bus=91gbit")


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "level"), [(1, ""), (8, "hosts+")])
@pytest.mark.parametrize(("rate", "more"), [("1gbit", True), ("10gbit", True), ("16gbit", False)])
def test_a_plan_takes_what_the_table_of_networks_does_and_names_its_next_step(gpus, level, rate, more, plan):
    flags = ("--hosts=2", f"--gpus-per-host={gpus}", f"--rate={rate}", "--step-seconds=0.121")
    words = next(line for line in plan("--parameters=124M", *flags).splitlines() if line.startswith("Take "))
    assert words.startswith(f'Take "{level}int8". ')
    saves = re.search(
        rf' Next step: "{re.escape(level)}int4", which saves (\d+) % of its step and can cost loss \(', words
    )
    assert (saves is not None and int(saves[1]) >= 9) == more
    assert (f'"{level}int4" would save less than 9 % of that step.' in words) != more


@pytest.mark.slow
def test_a_plan_of_hosts_with_several_gpus_has_the_speed_ups_of_trees_and_of_rings(planned, plan):
    flags = ("--parameters=124M", "--hosts=2", "--gpus-per-host=8", "--rate=1gbit", "--step-seconds=0.121")
    rows = {row["compressor"]: row["speed_up"] for row in planned(*flags)["rows"]}
    sharded = plan(*flags, "--parallel=fsdp")
    assert re.search(
        r"Then a step of DDP without gradwire takes .*, and the speed-ups over it are: hosts\+bf16 ", sharded
    )
    rings = re.search(r"Then a step without gradwire takes .* the speed-ups are: .*", plan(*flags))[0]
    (faster,) = re.findall(r"hosts\+int8 ([\d.]+)x", rings)
    assert float(faster) == pytest.approx(rows["hosts+int8"] * 15 / 8, rel=0.02)  # 16 ranks in a ring, not two hosts


def test_a_plan_names_no_further_compressor_that_saves_too_little(plan):
    flags = ("--parallel=fsdp", "--dtype=bf16", "--step-seconds=0.02", "--rate=1gbit")
    words = plan("--parameters=1M", "--hosts=2", *flags).splitlines()[-3]
    assert words.startswith('Take "int8". ')
    assert ' gather="int8", reduce="int4" would save less than 9 % of that step.' in words


def test_a_plan_says_up_to_which_computation_compression_pays_and_has_no_line_beyond(planned, plan):
    flags = ("--parameters=124M", "--hosts=2", "--rate=10gbit")
    words = next(line for line in plan(*flags, "--step-seconds=0.1").splitlines() if line.startswith("Take "))
    (limit,) = re.findall(r" Compression pays while a step computes for less than about ([\d.]+) s\.", words)
    for seconds, pays in ((0.9 * float(limit), True), (1.1 * float(limit), False)):
        rows = planned(*flags, f"--step-seconds={seconds}", "--compressors=bf16,int8")["rows"]
        assert (max(row["speed_up"] for row in rows) >= 1.1) == pays
        printed = plan(*flags, f"--step-seconds={seconds}")
        assert ("Do not compress: " in printed) != pays
        assert ("attach" in printed) == pays


def test_a_plan_of_muon_under_fsdp2_leaves_shards_and_has_a_line_for_each_way(plan):
    flags = ("--parallel=fsdp", "--optimizer=muon", "--dtype=bf16")
    *_, words, _, whole, sharded, _ = plan("--parameters=1M", "--hosts=2", "--rate=10gbit", *flags).splitlines()
    assert words.startswith("Leave fully_shard on all ranks for replicate(), if it fits: ")
    assert re.search(r" The network takes [\d.]+ s with replicate\(\) \(", words)
    assert ' replicate(): Take "int8". ' in words
    assert " Stop there: with Muon, 4 bits cost loss. Or train with AdamW, whose step sends nothing." in words
    assert whole.strip().startswith('handle = gradwire.attach(model, "int8", optimizer=[muon, adamw])')
    assert sharded.strip().startswith(
        'handle = gradwire.attach(model, gather="int8", reduce="int8", optimizer=[muon, adamw])'
    )


@pytest.mark.parametrize(("dtype", "said"), [("bf16/fp32", True), ("fp32", False)])
def test_a_policy_that_reduces_in_16_bits_sends_no_more_than_bf16(dtype, said, plan):
    flags = (
        "--parallel=fsdp",
        "--hosts=2",
        "--rate=10gbit",
        "--step-seconds=0.4",
        "--optimizer=muon",
        f"--dtype={dtype}",
    )
    printed = plan("--parameters=160M", *flags)
    assert 'Take "bf16". ' in printed
    assert (" reduce_dtype=torch.bfloat16 in your policy sends as few bytes without gradwire." in printed) == said
