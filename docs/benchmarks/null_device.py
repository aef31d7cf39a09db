"""A GPU that does nothing, for measuring the host: no CUDA is needed.

Tensors lie on the CPU, are small, and say that they lie on CUDA. Streams, events, collectives and Triton's kernels take
calls and do nothing. All that Python and torch do on the host before such a call stays: Triton's binder, torch's dispatch,
gradwire's engine.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # registers the backend

from gradwire import kernels
from gradwire.ddp_core.averaging.engines import Engines
from gradwire.ddp_core.engine.engine import Engine

DEVICE = torch.device("cuda", 0)
ARCHITECTURE = 90  # for which Triton's binder specializes


class NullStream:
    """In the place of torch.cuda.Stream."""

    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what a stream takes."""

    def wait_stream(self, stream: object) -> None:
        """Wait for nothing."""


class NullEvent:
    """In the place of torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Take what an event takes."""

    def record(self, stream: NullStream) -> None:
        """Record nothing."""

    def wait(self, stream: NullStream) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Return True: all is done."""
        return True


class NullStreams:
    """The current stream, and a context that changes it."""

    def __init__(self) -> None:
        self.now = NullStream()

    def current(self, device: object = None) -> NullStream:
        """Return the current stream."""
        return self.now

    @contextmanager
    def stream(self, stream: NullStream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class NullKernel:
    """In the place of what Triton compiles."""

    function, packed_metadata, launches = 0, (), 0

    def run(self, *_: Any) -> None:
        """Count the launch."""
        NullKernel.launches += 1

    def launch_metadata(self, *_: Any) -> None:
        """Return nothing, as without hooks."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """Return what launches it with a grid."""
        return self.run


def null_triton() -> list[Any]:
    """Patches that have Triton launch kernels that do nothing."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", ARCHITECTURE, 32)
    null = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda index: 0, get_current_target=lambda: target
    )

    def compiled(self: Any, key: str, *_: Any, **__: Any) -> NullKernel:
        kernel_cache = self.device_caches[0][0]
        kernel_cache[key] = NullKernel()
        return kernel_cache[key]

    return [mock.patch.object(driver, "_active", null), mock.patch.object(JITFunction, "_do_compile", compiled)]


def null_cuda() -> list[Any]:
    """Patches that have torch's streams and events do nothing, and tensors of the CPU say that they lie on a GPU."""
    streams = NullStreams()
    names = {"Stream": NullStream, "Event": NullEvent, "stream": streams.stream, "current_stream": streams.current}
    names |= {"device": nullcontext, "current_device": lambda: 0, "is_current_stream_capturing": lambda: False}
    tensors = {"is_cuda": property(lambda tensor: True), "get_device": lambda tensor: 0}
    tensors["record_stream"] = lambda tensor, stream: None
    pageable = mock.patch.object(torch, "empty", lambda *size, pin_memory=False, **given: empty(*size, **given))
    return [
        pageable,
        *(mock.patch.object(torch.cuda, name, value) for name, value in names.items()),
        *(mock.patch.object(Tensor, name, value) for name, value in tensors.items()),
    ]


def on_null_device(engines: Engines, device: torch.device, index: int) -> Engine:
    """In the place of Engines.of: the engine of a GPU."""
    return engine_of(engines, DEVICE, index)


engine_of, empty = Engines.of, torch.empty


@contextmanager
def null_device(ranks: int = 2) -> Iterator[None]:
    """Be rank 0 of so many, with a GPU that does nothing. Operations run on Triton."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    options = fake_pg.FakeProcessGroup.Options()
    options.simulate_uniform_ranks = True  # replies that torch's hooks look at
    dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_pg.FakeStore(), pg_options=options)
    patches = [*null_cuda(), *null_triton(), mock.patch.object(Engines, "of", on_null_device)]
    patches += [mock.patch.object(each, "chosen", return_value="triton") for each in kernels.operations().values()]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in reversed(patches):
            each.stop()
        dist.destroy_process_group()
