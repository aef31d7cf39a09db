"""Sites that train on threads of one process, each with a model of its own."""

import threading
import time
from datetime import timedelta

import torch

from gradwire import LocalSteps, Rendezvous
from gradwire.hooks.internet.server import Server

LIMIT = 90.0  # seconds of a round: a machine that stops a site for a while does not make it late
GRACE = timedelta(seconds=0.3)  # for a site that has left, where the others are most
EVENT = 60.0  # seconds in which an event comes
SHORT, BUSY = 6.0, 10.0  # of trials: seconds of a round, and those that a busy machine takes


class Net(torch.nn.Module):
    """Two matrices and a layer with buffers; its numbers depend on the seed."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
        self.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)

    def forward(self, inputs):
        return self.last(self.norm(self.first(inputs)).relu())


def batch(site, step, dtype=torch.float32):
    """Inputs and targets of a site's step."""
    generator = torch.Generator().manual_seed(1000 * site + step)
    inputs = torch.randn(8, 4, generator=generator).to(dtype)
    return inputs, inputs[:, :3] * 0.5


def descend(model, optimizer, site, step):
    """One step of training."""
    inputs, targets = batch(site, step, model.first.weight.dtype)
    optimizer.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()


def built(site, at=None, model=None, momentum=0.0, **options):
    """The model of a site, its optimizer, and what averages it."""
    model = Net(site) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return model, optimizer, LocalSteps(model, optimizer, at=at, **{"every": 4, "fragments": 2, **options})


def met(made):
    """The first meetings of sites that are set up alike."""
    for each in made:
        each.join("alike")
    return together(len(made), lambda site: made[site].meet())


def together(count, function):
    """function(site) of all sites at once; the results in order, or the exceptions that they raised."""
    results = [None] * count

    def run(site):
        try:
            results[site] = function(site)
        except Exception as error:
            results[site] = error

    threads = [threading.Thread(target=run, args=(site,), daemon=True) for site in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


def until(holds):
    """Return once it does."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < EVENT
        time.sleep(0.005)


class Town:
    """A rendezvous in this process."""

    def __init__(self, *, relay=False):
        self.store = Server(relay=relay)
        self.address = f"127.0.0.1:{self.store.port}"

    def waiting(self, prefix):
        """The names of the sites that wait for a meeting."""
        gathering = self.store._gatherings.get(prefix)
        return {each.name for each in list(gathering.waiting.values())} if gathering else set()

    def meeting_place(self, sites, name, **options):
        """Where a site meets the others."""
        return self.at(self.address, sites, name, **options)

    @staticmethod
    def at(address, sites, name, **options):
        """The same, from another process."""
        options = {"limit": timedelta(seconds=LIMIT), "start": timedelta(seconds=EVENT)} | options
        return Rendezvous(address, sites, name=name, **options)
