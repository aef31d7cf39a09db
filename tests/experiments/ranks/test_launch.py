import os
import signal
from datetime import timedelta

import pytest
import torch

from gradwire.experiments.ranks.launch import device_of, joined, rendezvous_in, sigterm_interrupts, unused_gpus


@pytest.mark.parametrize("name", ["plain", "with a space", "per%20cent", "what?#;"])
def test_ranks_meet_in_a_folder_of_any_name(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    rendezvous = rendezvous_in(folder, rank=0, nproc=1)
    assert list(folder.iterdir())
    with joined("gloo", timedelta(seconds=30), rendezvous) as group:
        assert (group.rank(), group.size()) == (0, 1)
        assert rendezvous["store"].timeout == timedelta(seconds=30)


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


@pytest.mark.parametrize(
    ("count", "backend", "told"),
    [(0, "gloo", None), (8, "nccl", None), (1, "gloo", "1 GPU here and not"), (8, "gloo", "8 GPUs here and not")],
)
def test_gpus_are_missed_where_ranks_train_on_the_cpu(count, backend, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = unused_gpus(backend)
    assert (found or "").startswith(told or "")
    assert (found is None) == (told is None)
    assert device_of(backend) == ("cuda" if backend == "nccl" else "cpu")
