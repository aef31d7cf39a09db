"""Replies that come late on a stream of their own, NaN until then: every reader on a GPU is ordered behind them."""

import pytest

from ..ddp_core.behaviour.test_late_replies import LateReplies, LateRepliesOnHosts
from .test_engine_cuda import needs_nccl

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LIMIT = 280  # seconds: all kernels of all methods may have to be compiled first


class TestTwoRanksOfGloo(LateReplies):
    """Both on one GPU."""

    device, limit = "cuda", LIMIT


class TestFourRanksOfGloo(LateRepliesOnHosts):
    """All on one GPU."""

    device, limit = "cuda", LIMIT


@needs_nccl
class TestOneRankOfNccl(LateReplies):
    """Where not even the host waits."""

    device, backend, world_size, limit = "cuda", "nccl", 1, LIMIT
