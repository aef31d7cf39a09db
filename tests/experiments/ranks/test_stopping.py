import os
import signal

import pytest

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
