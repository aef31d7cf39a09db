"""The ranks of a process group as the participants in each round of local SGD."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

import torch.distributed as dist

from ...compress.protocol.requests import Request
from ...ddp_core.averaging.same_kernels import agree_on_kernels
from ...ddp_core.transport.lost_ranks import explained, meet, place
from ...ddp_core.transport.private_group import new_name, private_group
from ...ddp_core.transport.process_group import over, started
from ...ddp_core.transport.protocol import Reply
from ...ddp_core.transport.rank_messages import exchange
from ...ddp_core.transport.same_setup import agree
from ..internet.late_sites import Claim
from ..internet.meeting import CPU, Meeting

WAITS = 8  # of a round, and more than it has


class GroupMeeting(Meeting):
    """The ranks of a process group. `closed`: a wait for them fails within a second."""

    closed = False

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(group, [f"rank {rank}" for rank in range(group.size())], timeout)

    def _started(self, request: Request) -> Reply:
        return started(request, self.group, self._look)

    def _look(self) -> None:
        if self.closed:
            raise RuntimeError("local SGD has ended on this rank in the middle of a round")


class FixedSites:
    """The ranks of a process group, each of them a site in every round."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.patience = WAITS * timeout.total_seconds()  # after which a round has failed for sure
        self.group, self._parent, self._timeout = group, over(group), timeout
        self._meeting: GroupMeeting | None = None

    def join(self, setup: str, operations: Collection[str] = (), *, varies_with_threads: bool = False) -> None:
        """Make a group of their own, whose requests do not mix with the user's. A collective call.

        `operations`: of kernels, which run on the same backend on all ranks from now on.
        `varies_with_threads`: True if a site's threads change its arithmetic.
        """
        agree(setup, self._parent, what="the setup of LocalSteps")
        differ = agree_on_kernels(operations, self._parent, CPU, varies_with_threads=varies_with_threads)
        meet(self.group, exchange(place(), self._parent, what="their processes"))
        group = private_group(self._parent.group, self._timeout, new_name(self._parent))
        self._meeting = GroupMeeting(group, self._timeout)
        self._meeting.differ = differ

    def meet(self, claim: Claim) -> Meeting:
        """Return the meeting of all ranks."""
        if self._meeting is None:
            raise RuntimeError("a round of LocalSteps has failed, or close() was called: there are no more")
        return self._meeting

    def break_up(self, error: Exception) -> None:
        """Raise it: a rank of a process group cannot be done without."""
        self._meeting = None
        raise RuntimeError(
            f"a round of LocalSteps failed, as a rank has died, hangs or raised an error. Sites that may come and go meet "
            f"in a gradwire.Rendezvous instead of a process group. {explained(error, self.group)}"
        ) from error

    def end(self, number: int) -> None:
        """Nothing: no rank comes after the others have ended."""

    def close(self) -> None:
        """Let go of the group; a round that waits for other ranks fails."""
        if self._meeting is not None:
            self._meeting.closed = True
        self._meeting = None
