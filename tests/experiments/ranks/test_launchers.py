"""Threads of ranks that share a machine."""

import os

import pytest

from gradwire.experiments.ranks.launchers import LAB_VARIABLE, threads_here


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 4),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "8", LAB_VARIABLE: "8 hosts at 1gbit"}, 1),  # which share one machine
        ({"LOCAL_WORLD_SIZE": "64", "WORLD_SIZE": "64"}, 1),
    ],
    ids=["our own ranks", "four a machine", "one a machine", "a lab", "more than cores"],
)
def test_ranks_on_one_machine_share_its_cores_unless_they_are_told_otherwise(variables, threads, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", LAB_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert threads_here(0, nproc=2) == threads
    assert threads_here(3, nproc=2) == 3
