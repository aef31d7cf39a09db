"""torch's own tests of DistributedDataParallel, on the class that GRADWIRE_CONFORMANCE names: torch or gradwire.

Ranks are processes of their own, which import this module and so make the same choice: it binds the class to every name
under which the tests look it up, before they are imported. With GRADWIRE_CONFORMANCE_DEVICE=moved, tests for GPUs run on
the CPU. GRADWIRE_CONFORMANCE_COLLECTIVES (above, off) has the default group taken over, and nothing in it compressed.
"""

import importlib
import logging
import os
import sys
import warnings
from contextlib import nullcontext

import torch
from torch.nn.parallel import distributed as home
from torch.testing._internal import common_distributed

import gradwire

from . import cpu_device

WORLD_SIZE = os.environ.setdefault("WORLD_SIZE", "2")
MOVED = os.environ.get("GRADWIRE_CONFORMANCE_DEVICE") == "moved"
COLLECTIVES = os.environ.get("GRADWIRE_CONFORMANCE_COLLECTIVES")
LEAST = {"above": 2**40, "off": 1}  # bytes

os.environ.update(BACKEND="gloo", GLOO_SOCKET_IFNAME="lo")
os.environ.setdefault("TEMP_DIR", "")  # the tests make one for each case
torch.set_num_threads(1)
if os.environ.get("GRADWIRE_CONFORMANCE") != "torch":
    torch.nn.parallel.DistributedDataParallel = gradwire.DistributedDataParallel
    home.DistributedDataParallel = gradwire.DistributedDataParallel
if MOVED:
    importlib.import_module("torch.testing._internal.common_device_type")  # asks for GPUs, before the stand-in
    cpu_device.on_the_cpu(home.DistributedDataParallel)
    cpu_device.stand_in(int(WORLD_SIZE))
    cpu_device.count_no_gpus(common_distributed)

distributed_test = importlib.import_module("torch.testing._internal.distributed.distributed_test")
assert distributed_test.DistributedDataParallel is home.DistributedDataParallel
if MOVED:
    distributed_test.HAS_TORCHVISION = False  # its networks take minutes on a CPU
warnings.simplefilter("ignore")
logging.getLogger("torch").setLevel(logging.ERROR)


class Upstream(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All of the cases; each starts its ranks."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self):
        # forks of this process, which runs nothing itself: a tenth of the seconds of a bare start
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name, parent_pipe):
        if COLLECTIVES is None:
            super().run_test(test_name, parent_pipe)
            return
        handle = gradwire.compress_group(min_bytes=LEAST[COLLECTIVES])
        with handle.off() if COLLECTIVES == "off" else nullcontext():
            super().run_test(test_name, parent_pipe)
        if handle.stats().calls:
            parent_pipe.send(f"{handle.stats().calls} calls were compressed")
            sys.exit(self.TEST_ERROR_EXIT_CODE)
        handle.close()
