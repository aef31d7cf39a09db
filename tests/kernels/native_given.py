"""What the tests of the native backend share."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels import native

BACKEND = {backend.name: backend for backend in kernels.backends()}[native.NAME]
needs_native = pytest.mark.skipif(not BACKEND.available, reason=BACKEND.reason or "it is there")
SIZES = [1, 9, 1009, 200_003]  # the last is enough work for three threads
LARGE = 2_200_003  # a result of so many float32 is written around the caches


def native_of(operation):
    """An operation's implementation in this backend, whatever was chosen."""

    def run(*arguments, **named):
        with kernels.use_backend(native.NAME):
            return operation(*arguments, **named)

    return run


def unaligned(tensor):
    """The same numbers, one element past the start of an allocation."""
    return torch.cat([tensor.new_zeros(1), tensor])[1:]
