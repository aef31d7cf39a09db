import os
import signal

import pytest
from torch.multiprocessing import ProcessContext

from gradwire.experiments.ranks.processes import RankFailure, run_ranks
from gradwire.experiments.ranks.stopping import sigterm_interrupts


@pytest.fixture
def handled():
    """Set how this process handles a signal, until the test ends."""
    before = {}

    def handle(number, handler):
        before[number] = signal.signal(number, handler)
        return handler

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_and_a_terminal_that_goes_are_like_ctrl_c(number, handled):
    unhandled = handled(number, lambda *_: None)
    with pytest.raises(KeyboardInterrupt), sigterm_interrupts():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is unhandled


def test_what_nohup_has_ignored_stays_ignored(handled):
    handled(signal.SIGHUP, signal.SIG_IGN)
    with sigterm_interrupts():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def one_is_killed_and_one_raises(rank, rendezvous):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise LookupError("for want of the other")


def test_a_rank_that_is_killed_is_named_where_others_have_raised_before_anybody_looks(monkeypatch):
    def late(context, timeout):
        for process in context.processes:
            process.join()
        return join(context, timeout)

    join = ProcessContext.join
    monkeypatch.setattr(ProcessContext, "join", late)
    with pytest.raises(RankFailure) as told:
        run_ranks(one_is_killed_and_one_raises, 2)
    killed, *others = str(told.value).split("\n\n", 1)
    assert killed == "rank 1: process 1 terminated with signal SIGKILL"
    assert all("LookupError: for want of the other" in other for other in others)  # where torch looked at rank 0 first
