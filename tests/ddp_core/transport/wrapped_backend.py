"""A stand-in for torchcomms' wrapper around Gloo, which refuses exactly what the wrapper refuses.

torchcomms' `WorkWrapper::wait` throws for any time limit but none, and its works on Gloo have no future (torchcomms
issue 688). No wheel of torchcomms can be had, so a backend in Python behaves alike.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from gradwire.ddp_core.transport.direct.torch_backend import HANDED_ON

NAME = "wrapped"
OPERATIONS = (
    *HANDED_ON,
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "reduce_scatter",
    "reduce_scatter_single",
)


class WrappedWork(dist.Work):
    def __init__(self, work):
        super().__init__()
        self._inner = work

    def wait(self, timeout=timedelta(0)):
        if timeout != timedelta(0):
            raise RuntimeError("wait timeout not supported")
        return self._inner.wait()

    def get_future(self):
        raise RuntimeError("getFuture not implemented")

    def is_completed(self):
        return self._inner.is_completed()

    def result(self):
        return self._inner.result()


class WrappedBackend(Backend):
    options = None  # as of gradwire's backend

    def __init__(self, options, _=None):
        super().__init__(options.group_rank, options.group_size)
        self.works = []
        self.inner = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    def getBackendName(self):
        return "gloo"  # as the wrapper says the name of what it wraps

    def set_timeout(self, timeout):
        self.inner.set_timeout(timeout)

    def shutdown(self):
        self.inner.shutdown()


def _operation(name):
    def begun(self, *arguments):
        work = WrappedWork(getattr(self.inner, name)(*arguments))
        self.works.append(work)
        return work

    return begun


for _name in OPERATIONS:
    setattr(WrappedBackend, _name, _operation(_name))


class Seen:
    """What torch returns of a work, and whether it is completed, which torch asks no work in Python."""

    def __init__(self, work, inner):
        self._work, self.is_completed = work, inner.is_completed
        self.wait, self.get_future, self.result = work.wait, work.get_future, work.result


def _seen(allreduce):
    def begun(group, tensors, *arguments):
        work = allreduce(group, tensors, *arguments)
        backend = group._get_backend(tensors[0].device)
        return Seen(work, backend.works[-1]) if isinstance(backend, WrappedBackend) else work

    return begun


def register():
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, WrappedBackend, extended_api=True, devices=["cpu"])
        dist.ProcessGroup.allreduce = _seen(dist.ProcessGroup.allreduce)
