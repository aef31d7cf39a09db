"""Lines of pages for a script of the reader's own (```py) run as printed, on two CPU ranks in place of eight GPUs."""

import os
import re

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import gradwire

from ...test_docs import PAGES, blocks
from .launched import BATCH, TIMEOUT, data, launched, needing, network

TRAINER = """
import torch
from transformers import Trainer, TrainingArguments
from tests.hooks.frameworks.test_transformers import Regression, rows
model, data = Regression(), rows(2)
arguments = TrainingArguments("checkpoints", use_cpu=True, num_train_epochs=1, save_steps=1, disable_tqdm=True, report_to=[])
"""
PREPARED = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
"""
SCALED = """
from torch import nn
model, scaler = ddp_model, torch.amp.GradScaler("cpu", init_scale=8.0)
muon, adamw = (torch.optim.SGD([each for each in model.parameters() if each.ndim == n], 0.1) for n in (2, 1))
before = [each.detach().clone() for each in model.parameters()]
scaler.scale(model(torch.ones(2, 64)).sum()).backward()
"""
STEPPED = "assert not any(map(torch.equal, before, model.parameters()))"
STEP = "ddp_model(torch.ones(2, 64)).sum().backward()\nassert handle.stats().steps == 1"
NANO = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
model = torch.compile(model, backend="eager")
model = DDP(model)
"""
NANO_TRAINS = """
raw_model, before = model.module, [each.detach().clone() for each in model.parameters()]
for iteration in range(3):
    if dist.get_rank() == 0:  # evaluates alone
        raw_model.eval()
        with torch.no_grad():
            model(torch.ones(2, 64))
        raw_model.train()
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        scaler.scale(model(torch.ones(2, 64) + dist.get_rank()).square().mean() / 2).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
assert handle.stats().steps == 3 and handle.metrics()["ratio"] > 3
handle.check_parameters()
assert not any(map(torch.equal, before, raw_model.parameters()))
"""
SWAPPED = (
    "assert repr(handle).startswith(f'<Handle: none, rank {torch.distributed.get_rank()} of 2, ')"  # as pages print it
)
LINES = [  # a page, a word of its block, lines before and after it, and packages that they need
    ("frameworks", "comm_hooks.int8", "", STEP, []),
    ("frameworks", "scaler=scaler", NANO, NANO_TRAINS, []),
    ("frameworks", "gather_state_dict", "handle = gradwire.attach(ddp_model, 'int4')", "", []),
    ("frameworks", "pl.Trainer(", "import pytorch_lightning as pl", "", ["pytorch_lightning"]),
    (
        "frameworks",
        "RayDDPStrategy",
        "from ray.train.lightning import RayDDPStrategy\nfrom gradwire.lightning import GradwireStrategy",
        "RayGradwireStrategy('int4')",
        ["pytorch_lightning", "ray"],
    ),
    ("frameworks", "= Fabric(", "from lightning_fabric import Fabric", "", ["lightning_fabric"]),
    ("frameworks", "gradwire.accelerate(accelerator, model, ", PREPARED, "", ["accelerate"]),
    ("frameworks", "AccelerateKwargs", "from accelerate import Accelerator", "", ["accelerate"]),
    (
        "frameworks",
        "accelerate_locally",
        f"{PREPARED}model, optimizer = accelerator.prepare(model, optimizer)",
        "local.close()",
        ["accelerate"],
    ),
    (
        "training-script",
        "or another compressor: it holds",
        "handle = gradwire.attach(ddp_model, 'int4')\nsaved = {'compression': handle.gather_state_dict()}",
        f"{SWAPPED}\nddp_model(torch.ones(2, 64)).sum().backward()",
        [],
    ),
    (
        "training-script",
        "go-back",
        "import torch.distributed as dist\nfrom pathlib import Path\nrank, device = dist.get_rank(), 'cpu'\n"
        "handle = gradwire.attach(ddp_model, 'int4')\nPath('go-back').touch()\ndist.barrier()",
        f"{SWAPPED}\n{STEP}\nassert handle.metrics()['ratio'] == 1",
        [],
    ),
    ("training-script", "scaler.unscale_(each)", SCALED, STEPPED, []),
    ("frameworks", "GradwireCallback", TRAINER, "", ["transformers", "accelerate"]),
    (
        "frameworks",
        "SwapAt",
        f"{TRAINER}from transformers import TrainerCallback\nfrom gradwire.transformers import GradwireCallback\n"
        "trainer = Trainer(model, arguments, train_dataset=data)\ncallback = GradwireCallback(trainer, 'int8')\n"
        "trainer.add_callback(callback)",
        "trainer.train()\nassert callback.compression.metrics()['ratio'] == 1",
        ["transformers", "accelerate"],
    ),
]
ELSEWHERE = {  # where other blocks run
    "loops-without-ddp": "tests/hooks/collectives/test_zero_pattern.py",  # the calls of DeepSpeed, which is not installed
    "launchers": "docs/examples/train_ray.py",  # a worker of Ray has to call them
    "local-steps": "tests/hooks/local_sgd/test_example.py",
    "local-steps-explained": "tests/hooks/local_sgd/test_example.py",
}


def py_blocks():
    """(page, text) of all blocks of lines to paste."""
    found = [(page, block.text) for page in PAGES for block in blocks(page) if block.language == "py"]
    return [(re.sub(r"^docs/|\.md$", "", page), text) for page, text in found]


def as_here(text):
    """A block for two CPU ranks; "..." is the time between a save and a load."""
    text = text.replace('accelerator="gpu", devices=8', 'accelerator="cpu", devices=2')
    text = text.replace("global_step == 500", "global_step == 1")
    return text.replace("\n...\n", '\nsaved = {"compression": compression}\n')


def pasted(rank, world_size, source, folder):
    """Run lines in a folder, among the names that a script has by then."""
    model = network()
    names = {"torch": torch, "gradwire": gradwire, "model": model, "__name__": "pasted"}
    names |= {"ddp_model": DistributedDataParallel(network()), "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    names |= {"loader": DataLoader(data(world_size), BATCH)}
    before = os.getcwd()
    os.chdir(folder)
    try:
        with launched(rank, world_size):
            exec(compile(source, "pasted", "exec"), names)
            if handle := names.get("handle"):
                handle.close()
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    ("page", "word", "before", "after"),
    [
        pytest.param(*case, id=case[1], marks=[needing(*packages), *[pytest.mark.slow] * bool(packages)])
        for *case, packages in LINES
    ],
)
def test_lines_to_paste_run(page, word, before, after, ranks, tmp_path):
    (text,) = [text for name, text in py_blocks() if name == page and word in text]
    ranks.run(pasted, 2, f"{before}\n{as_here(text)}\n{after}", str(tmp_path), timeout=TIMEOUT)


def test_all_lines_to_paste_run_somewhere():
    here = [(page, word) for page, word, *_ in LINES]
    assert [
        text
        for page, text in py_blocks()
        if page not in ELSEWHERE and not any(page == name and word in text for name, word in here)
    ] == []
