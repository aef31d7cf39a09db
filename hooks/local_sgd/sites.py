"""The participants in a round of local SGD: the ranks of a process group, or sites that come and go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ...compress.protocol.ranks import Ranks
from ...compress.protocol.requests import AllGather, Request
from ...ddp_core.averaging.same_kernels import agree_on_kernels
from ...ddp_core.transport.collectives import agree, broadcast
from ...ddp_core.transport.private_group import new_name, private_group
from ...ddp_core.transport.process_group import GroupPending, started
from ...ddp_core.transport.protocol import Transport

CPU = torch.device("cpu")
WAITS = 8  # of a round, and more than it has


class Meeting(Transport):
    """The participants in a round, and the transport between them. Its tensors are on the CPU.

    `timeout`: of each wait.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.group, self.timeout = group, timeout
        self.ranks = Ranks(group.size(), group.rank())

    def start(self, request: Request, channel: int) -> GroupPending:
        """Give a request to the group. Raises ValueError for one inside hosts, which sites are not."""
        if request.scope == "host":
            raise ValueError("local steps are averaged over whole sites: use a compressor without hosts+")
        return started(request, self.group)

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every one's numbers, in rank order."""
        return started(AllGather(torch.tensor(numbers)), self.group).wait(self.timeout).tolist()

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Take over the tensors of rank `source`, in place."""
        broadcast(tensors, source, self.group, what="what the model is now")


class FixedSites:
    """The ranks of a process group, each of them a site in every round."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.patience = WAITS * timeout.total_seconds()  # after which a round has failed for sure
        self._parent, self._timeout = group, timeout
        self._meeting: Meeting | None = None

    def join(self, setup: str, operations: Collection[str] = ()) -> None:
        """Make a group of their own, whose requests do not mix with the user's. A collective call.

        `operations`: of kernels, which run on the same backend on all ranks from now on.
        """
        agree(setup, self._parent, what="how local steps are set up")
        agree_on_kernels(operations, self._parent, CPU)
        group = private_group(self._parent, self._timeout, new_name(self._parent, CPU))
        self._meeting = Meeting(group, self._timeout)

    def meet(self) -> Meeting:
        """Return the meeting of all ranks."""
        if self._meeting is None:
            raise RuntimeError("a round of local steps has failed, or close() was called: there are no more")
        return self._meeting

    def break_up(self, error: Exception) -> None:
        """Raise it: a rank of a process group cannot be done without."""
        self._meeting = None
        raise RuntimeError(
            f"a round of local steps failed, as a rank has died, hangs or raised an error; sites that may come and go meet "
            f"in a gradwire.Rendezvous instead of a process group. {error}"
        ) from error

    def end(self, number: int) -> None:
        """Nothing: no rank comes after the others have ended."""

    def close(self) -> None:
        """Let go of the group."""
        self._meeting = None
