"""Trains one model at two sites, which meet at `gradwire rendezvous`: python train_sites.py 127.0.0.1:29400 0 sites.pem.

The arguments are the address of the rendezvous, the site's number, 0 or 1, and the file with the secret. Without a file
the environment's GRADWIRE_SECRET has the secret.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gradwire

ROUNDS = 15
address, site, *files = sys.argv[1], int(sys.argv[2]), *map(Path, sys.argv[3:])

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
at = gradwire.Rendezvous(address, sites=2, name=f"site {site}", secret=next(iter(files), None))  # gradwire
local = gradwire.LocalSteps(model, optimizer, every=8, at=at)  # gradwire: the line to add

while local.round < ROUNDS:  # all sites count rounds alike
    source = torch.Generator().manual_seed(1_000_000 * site + local.steps)  # data of each site's own
    inputs = torch.randn(32, 64, generator=source)
    optimizer.zero_grad()
    cross_entropy(model(inputs), inputs[:, :8].argmax(1)).backward()
    optimizer.step()

local.finish()  # gradwire: all sites have the same model now
total = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"site {site}: {local.steps} steps, {local.round} rounds of {local.history[-1].sites} sites, model {total:.6f}")
