"""Command lines that are refused: in words that say what is wrong, before anything is started or written."""

import shlex

import pytest
import torch

from gradwire.experiments.cli import main
from gradwire.experiments.ranks import processes

DIGITS = "compare --model=mlp --data=digits"
SIMULATED = "compare --simulated"
FSDP = "plan --parallel=fsdp"
REFUSED = [
    ("advise --nproc=1", "advice needs two ranks or more, and there is 1: --nproc 2, or torchrun on hosts"),
    ("advise --hosts=16", "--hosts needs ranks on two hosts or more, or --link 10gbit"),
    ("advise --hosts=1", "hosts are at least 2, got 1"),
    ("advise --tolerance=-1", "tolerance is a part of the loss, at least 0"),
    ("advise --worthwhile=0.5", "worthwhile is a speed-up of at least 1"),
    ("advise --model=mlp --optimizer=muon", "optimizer muon is for --model gpt"),
    ("bench --models resnet5", "unknown model 'resnet5' (did you mean 'resnet50'?); there are: resnet50,"),
    ("bench --batch-size 0", "batch_size is at least 1, got 0"),
    ("bench --ddp horovod", "--ddp takes items separated by commas, each torch or gradwire, got 'horovod'"),
    ("bench --ddp torch --process-groups 3", "torch's DistributedDataParallel takes one process group"),
    ("bench --ddp torch --order priority", "takes one process group and backward"),
    ("bench --overlap false --order slices,priority", "orders other than that overlap with backward"),
    ("bench --dilate 2", "dilate 2 needs an emulated accelerator"),
    *((f"bench --compute=emulate:vgg19 --dilate={bad}", "above 0") for bad in ("0", "-1", ".inf", ".nan")),
    ("bench --compute=emulated", "compute is real, or emulate: and a trace"),
    ("bench --link=fast", "such as 100mbit"),
    ("bench --models tiny --world-sizes 1,3", "world_sizes has 3, and there are 2 ranks"),
    ("bench --netlab.rate 1gbit", "netlab.rate without hosts"),
    ("bench --netlab.utilization a.json", "netlab.utilization without hosts"),
    ("bench --netlab.rate 1gbit --netlab.utilization a.json", "netlab.rate and netlab.utilization without hosts"),
    ("bench --json /nowhere/a.json", "json: there is no folder /nowhere"),
    ("check --nproc=1", "two ranks or more"),
    ("collective --elements=many", "sizes are numbers of elements such as 100, 10k or 1M, got 'many'"),
    ("collective --elements=70M", "a piece of 70M is larger than the total of 60M"),
    ("collective --elements=", "name at least one size"),
    ("collective --operations=", "name at least one of all_reduce, all_gather, reduce_scatter"),
    ("collective --pieces=-1", "pieces is at least 1, or 0 for as many as make up the total; got -1"),
    (f"{DIGITS} --compressors none,powersdg", "unknown compressor 'powersdg' (did you mean 'powersgd'?)"),
    (f"{DIGITS} --compressors ''", "name at least one"),
    (f"{DIGITS} --compressors none,bf16,none", "names the same one twice: none"),
    (f"{DIGITS} --model mpl", "unknown model 'mpl' (did you mean 'mlp'?)"),
    (f"{DIGITS} --data digit", "unknown data 'digit' (did you mean 'digits'?)"),
    (f"{DIGITS} --data.path /nowhere", "/nowhere does not exist"),
    (f"{DIGITS} --netlab.rate 1gbit", "netlab.rate without hosts"),
    (f"{DIGITS} --backend mpi", "--backend takes auto or gloo or nccl or gloo-cuda, got 'mpi'"),
    (f"{DIGITS} --batch-size 719", "1437 samples to train on, fewer than one batch of 719 for each of 2 ranks"),
    (f"{DIGITS} --link=none,0", "above 0"),
    (f"{DIGITS} --link=100mbit,none,100mbit", "twice"),
    (f"{DIGITS} --link=100mbit,fast", "such as 100mbit"),
    (f"{DIGITS} --logger wand", "unknown logger 'wand'; there are: wandb, tensorboard"),
    (f"{DIGITS} --parallel=fsdp --compressors=powersgd", "no rank has whole"),
    (f"{DIGITS} --parallel=fsdp --compressors=int8/topk", "no rank has whole"),
    (f"{DIGITS} --parallel=fsdp --compressors=int9/int8", "unknown compressor"),
    pytest.param(
        f"{DIGITS} --backend=nccl",
        "nccl needs a GPU per rank: 2 ranks",
        marks=pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs"),
    ),
    (f"{SIMULATED} --link=1gbit", "have no network"),
    (f"{SIMULATED} --netlab.hosts=2", "have no network"),
    (f"{SIMULATED} --backend=nccl", "without a process group"),
    (f"{SIMULATED} --ddp=torch", "have no DistributedDataParallel"),
    (f"{DIGITS} --checkpoints=kept", "checkpoints are of simulated ranks"),
    (
        "compressors int5",
        "unknown compressor 'int5' (by bits there are bf16, fp16, int8, int4, int2 and onebit); there are: acp-powersgd, ",
    ),
    ("kernels --operations topk", "unknown operation 'topk'; there are: cast_scaled:to=fp16, "),
    ("kernels --backends fortran", "unknown kernel backend 'fortran'; there are: "),
    ("kernels --sizes many", "sizes are numbers of elements such as 100, 10k or 1M, got 'many'"),
    ("kernels --sizes 1k", "sizes are at least 32768 elements, got 1k"),
    ("kernels --operations powersgd --dtypes bf16", "nothing to measure: powersgd:rank=1 of bf16"),
    pytest.param(
        "kernels --device cuda",
        "torch sees no CUDA device here",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    ),
    ("plan --compressors ,", "compressors is empty: name at least one"),
    ("plan --local-every -1", "local_every is at least 1, or 0 for the gradients of every step; got -1"),
    ("plan --bus=0", "pcie3x16, pcie4x16, pcie5x16 or a rate above 0"),
    (f"{FSDP} --compressors powersgd", "no rank has whole"),
    (f"{FSDP} --compressors none/topk", "no rank has whole"),
    (f"{FSDP} --workers=4 --compressors none/hosts:ranks=3+int4", "does not divide"),
    (f"{FSDP} --bucket-mb 1", "of ddp: leave them out"),
    (f"{FSDP} --step-seconds=1", "--step-seconds goes with a network: add --rate"),
    ("plan --parameters=many", "a number such as 124M, 1.2B or 72.7e9, got 'many'"),
    ("plan --parameters=10M --model=lstm", "in place of --model: leave one out, got 10M and lstm"),
    ("plan --link=1gbit", "did you mean --rate?"),
    ("plan --gpus-per-host=8", "goes with --hosts"),
    ("plan --hosts=1 --gpus-per-host=4 --rate=10gbit", "add --bus, such as --bus pcie4x16"),
    ("plan --hosts=2 --micro-batches=0", "--micro-batches are at least 1"),
    ("plan --optimizer=muon --model=mlp", "optimizer muon is for gpt and --parameters, and the model is mlp"),
    ("plan --optimizer=muon --parameters=1M --sites=2", "leave it out of local SGD"),
    ("plan --dtype=fp8", "--dtype is fp32, bf16, fp16"),
    ("plan --dtype=bf16/fp32", "with --parallel fsdp WEIGHTS/GRADIENTS such as bf16/fp32; got 'bf16/fp32'"),
    ("plan --hosts=2 --workers=16", "--workers=16 is not the ranks of 2 hosts: leave it out"),
    ("plan --step-seconds=1", "--step-seconds goes with a network: add --rate"),
    ("plan --hosts=2 --rate=10gbit --micro-batches=2", "--micro-batches goes with --step-seconds"),
    ("plan --local-every=4 --rate=10gbit", "leave out --rate and --step-seconds"),
    ("plan --sites=1", "--sites is at least 2"),
    ("plan --sites=2 --up=0", "--up and --down are rates above 0"),
    ("plan --sites=2 --parameters=1e20", "--parameters is from 1 to"),
    ("plan --sites=2 --parallel=fsdp", "leave out --parallel"),
    ("plan --sites=2 --model=mlp --compressors=hosts+int4", "without hosts+"),
    ("ready --steps=0", "steps is at least 1, got 0"),
    ("ready --model=x", "unknown"),
    ("ready --json=.", "json: . is a folder; name a file, such as figures.json"),
    ("rendezvous --port=-1", "from 0 to 65535"),
    ("top --once=true", "folder is empty: name the one of"),
    ("top missing --once=true", "cannot read"),
    ("top . --once=true", "has no report of a rank"),
    ("try --steps=20", "give the command of your script behind --"),
    ("try --steps=1 -- true", "steps is at least 2, got 1"),
    ("try --limit=0 -- true", "limit is above 0 seconds"),
    ("try --compressors=int44 -- true", "unknown compressor 'int44'"),
    ("try --compressors=int8/powersgd -- true", "no rank has whole"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_a_command_line_is_refused_before_anything_starts(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes.multiprocessing, "start_processes", None)
    assert main(shlex.split(line)) == 2
    written = capsys.readouterr()
    assert message in " ".join(written.err.split())
    assert not written.out
    assert list(tmp_path.iterdir()) == []
