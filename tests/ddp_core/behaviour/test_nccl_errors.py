"""NCCL's time limit and its aborted communicators, by a stand-in over Gloo: errors name the bucket, and nothing stays."""

import gc
import importlib.util
import threading
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Backend

import gradwire
from gradwire.ddp_core.averaging.engines import Engines
from gradwire.ddp_core.transport.direct.torch_backend import HANDED_ON

from ...torch_versions import backends_in_python
from ..errors import timed_message_of

FILE = Path(__file__).parents[3] / "docs" / "benchmarks" / "null_device.py"
STEPS, LIMIT = 2, timedelta(seconds=1)
pytestmark = backends_in_python


class NcclWork(dist.Work):
    """In the place of NCCL's work. With TORCH_NCCL_BLOCKING_WAIT=1 a wait blocks the host until the group's time limit.

    Without it, only streams wait: the host goes on, whether the collective ends or not.
    """

    def __init__(self, inner, backend):
        super().__init__()
        self._inner, self._backend = inner, backend

    def wait(self, timeout=timedelta(0)):
        if not self._backend.blocks:
            return True
        try:
            return self._inner.wait(self._backend.limit)
        except RuntimeError:
            self._backend.aborted = True
            raise dist.DistBackendError(
                "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=72, "
                "NumelOut=72, Timeout(ms)=1000) ran for 1003 milliseconds before timing out."
            ) from None


class ProcessGroupNCCL(Backend):
    """In the place of NCCL's group. Its name and that of its class are NCCL's, by which gradwire knows it."""

    def __init__(self, store, rank, size, _=None):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))
        self.aborted, self.blocks, self.limit = False, True, timedelta(seconds=30)

    @property
    def options(self):
        return SimpleNamespace(_timeout=self.limit)

    def getBackendName(self):
        return "nccl"


def _operation(name):
    def begun(self, *arguments):
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 0.")
        return NcclWork(getattr(self.inner, name)(*arguments), self)

    return begun


for _name in (*HANDED_ON, "_allgather_base", "all_gather_single", "all_to_all_single", "allgather"):
    setattr(ProcessGroupNCCL, _name, _operation(_name))


def on_a_gpu_of_ours(stack):
    """Have streams do nothing, and tensors of the CPU say that they lie on a GPU."""
    spec = importlib.util.spec_from_file_location("null_device", FILE)
    null = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(null)
    for patch in (*null.null_cuda(), mock.patch.object(Engines, "of", null.on_null_device)):
        stack.enter_context(patch)


def step(model):
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()


def training(rank, world_size, spec, failure):
    """What rank 0 raises once rank 1 sends no more; then the seconds of close(), and the threads that are left."""
    if "standin" not in dist.Backend.backend_list:
        dist.Backend.register_backend("standin", ProcessGroupNCCL, devices=["cpu", "cuda"])
    threads = set(threading.enumerate())
    group = dist.new_group(backend="cpu:standin,cuda:standin")
    backend = group._get_backend(torch.device("cpu"))
    with ExitStack() as stack:
        on_a_gpu_of_ours(stack)
        torch.manual_seed(0)
        model = gradwire.DistributedDataParallel(nn.Linear(8, 8), process_group=group, compressor=spec)
        for _ in range(STEPS):
            step(model)
        dist.barrier()
        told = []
        if rank == 0:
            backend.limit, backend.aborted, backend.blocks = LIMIT, failure == "aborted", failure != "never completes"
            told = [timed_message_of(step, model) for _ in range(2)]
        told.append(timed_message_of(model.compression.close))
        del model
        gc.collect()  # while the stand-ins are there, which its end asks
        dist.barrier()
    return told, [each.name for each in set(threading.enumerate()) - threads]


@pytest.mark.parametrize("failure", ["times out", "aborted"])
@pytest.mark.parametrize("spec", ["none", "bf16", "powersgd:rank=1", "onebit"])
def test_nccls_error_names_the_bucket_and_leaves_nothing_behind(ranks, spec, failure):
    (first, threads), _ = ranks.run(training, 2, spec, failure)
    (message, seconds), (then, _), (of_close, closing) = first
    assert message.startswith("RuntimeError: bucket 0 (parameters ")
    assert ("Watchdog caught" if failure == "times out" else "communicator was aborted") in message
    assert "look for the error of the rank that failed first" in message
    assert seconds < LIMIT.total_seconds() + 5
    assert "the averages of the step before did not all come" in then
    assert (of_close, threads) == ("", [])
    assert closing < 5


@pytest.mark.parametrize("spec", ["none", "powersgd:rank=1"])
def test_a_collective_that_never_completes_holds_up_no_host_and_no_close(ranks, spec):
    """As without that variable: on a GPU streams wait, until NCCL's watchdog ends the process."""
    (told, threads), _ = ranks.run(training, 2, spec, "never completes")
    assert [message for message, _ in told] == ["", "", ""]
    assert max(seconds for _, seconds in told) < 5
    assert threads == []
