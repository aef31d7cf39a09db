"""What a steady step would wait for on a GPU, without one: tensors that say they are there, and have no numbers to read.

Torch's fake tensors take the branches of CUDA, run no arithmetic, and raise where the host asks for a number or for how
many elements there are; copies between host and device must not block. Kernels do nothing here: test_training_cuda.py looks
at them, on a GPU.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.compress import Layout, Ranks, compressor, compressors
from gradwire.compress.algorithms import zero_rows
from gradwire.compress.protocol.requests import next_request
from gradwire.compress.simulate import alike
from gradwire.compress.state import gauge
from gradwire.compress.state.gauge import Arriving
from gradwire.ddp_core.memory.bucket_memory import BucketMemory, DeviceFlag
from gradwire.kernels import Rows, dispatch, quantization

from ..torch_versions import fake_devices

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to look at"), fake_devices]
SHAPES = ((64, 80), (9,), (48, 30))
WARM, EVERY, STEPS = 4, 8, 14  # beyond a sample (7), an agreement of `adaptive` (8), and what follows
LADDER = "adaptive:ladder=none/powersgd:rank=2/topk:ratio=0.1/onebit:block=64"
SAMPLE = [1.0, 0.5, 0.8, 1.0, 0.9]  # of a gauge
SPECS = [*compressors(), LADDER, "fp16+powersgd:rank=1", "powersgd:warm_start=false", "powersgd:rank=2,start_iter=6"]


class NoWaits(TorchDispatchMode):
    """Raises where a copy between host and device blocks, once `steady`."""

    steady = False

    def __enter__(self):
        NoWaits.now = self
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # there is no memory to pin
        result = function(*args, **kwargs)
        if self.steady and function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if function is torch.ops.aten.copy_.default else args[0]
            blocks = not (kwargs.get("non_blocking") or args[2:] == (True,))
            assert source.device == result.device or not blocks, "a copy that the host waits for"
        return result


def new_rows(blocks):
    """Rows whose table a kernel has not copied to the device yet, which the host waits for."""
    assert not NoWaits.now.steady, "a table of new rows, which the host waits for"
    return Rows(blocks)


@pytest.fixture
def told(monkeypatch):
    """Pretends that there is a GPU; what has arrived from it by the next step, by how many numbers that are."""
    told = {}
    stand_in = SimpleNamespace(record=lambda stream: None, query=lambda: True, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Arriving, "read", lambda arriving: told[arriving._numbers.numel()])
    monkeypatch.setattr(DeviceFlag, "__bool__", lambda flag: True)
    monkeypatch.setattr(quantization, "philox", lambda seed, counters: counters)  # arithmetic that no host sees
    monkeypatch.setattr(gauge, "EVERY", EVERY)
    monkeypatch.setattr(zero_rows, "Rows", new_rows)
    zero_rows._rows.cache_clear()
    monkeypatch.setattr(dispatch.Operation, "__call__", dispatch.Operation._without_numbers)
    return told


def run(spec, dtype=torch.float32, partial=False):
    """Steps of a bucket; with `partial`, such as may leave parameters out."""
    with FakeTensorMode(), NoWaits() as watch:
        layout = Layout(("a", "b", "c"), SHAPES, dtype, torch.device("cuda", 0), Ranks(2))
        memory = BucketMemory(compressor(spec), layout, 0, partial=partial)
        for step in range(STEPS):
            watch.steady = step >= WARM
            flat = torch.zeros(layout.numel, dtype=dtype, device="cuda")
            program, reply = memory.reduce(flat, step, watched=True), None
            while (request := next_request(program, reply)[0]) is not None:
                reply = alike(request, layout.ranks)
            memory.end_step(keep=bool(memory.finite), any_rank_owes=False)


@pytest.mark.parametrize("spec", SPECS)
def test_the_host_reads_nothing_in_a_steady_step(told, spec):
    """Of a ladder the method in the middle is taken."""
    for methods in (1, 2, 3, 4):
        told[methods + 1] = [0.9] * methods + [methods // 2]
    told[len(SAMPLE)] = SAMPLE
    run(spec, (torch.float32, torch.bfloat16)[SPECS.index(spec) % 2])


@pytest.mark.parametrize("spec", ["none", "topk:ratio=0.1", "powersgd:rank=2"])
def test_parameters_that_are_left_out_are_found_without_a_wait(told, spec):
    told[len(SAMPLE)] = SAMPLE
    run(spec, partial=True)


WAITS = {
    "a number": lambda numbers: numbers.sum().item(),
    "a condition": lambda numbers: 1 if numbers.any() else 0,
    "a list": torch.Tensor.tolist,
    "how many": lambda numbers: numbers[numbers > 0],
    "where": torch.nonzero,
    "a copy to the host": torch.Tensor.cpu,
    "a copy from the host": lambda numbers: torch.zeros(3, device="cpu").to(numbers.device),
    "numbers of the host's": lambda numbers: torch.tensor([1.0, 2.0], device=numbers.device),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_what_the_host_would_wait_for_is_seen(told, wait):
    with FakeTensorMode(), NoWaits() as watch:
        watch.steady, numbers = True, torch.ones(3, device="cuda")
        with pytest.raises((AssertionError, RuntimeError), match=r"host waits|_local_scalar_dense|nonzero|tolist"):
            wait(numbers)
        numbers.to("cpu", non_blocking=True)
