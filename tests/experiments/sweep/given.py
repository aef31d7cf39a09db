import csv
import os
from contextlib import suppress
from pathlib import Path

from gradwire.experiments.cli import main

STUDY = """
title: Pieces
source: a test
command: collective
base: {nproc: 1, total: 1000, repeats: 1}
grid: {elements: [10, 100, 1000]}
shortened: {grid: {elements: [1000]}}
derive: {slowdown: {kind: ratio, of: seconds.p50, against: {elements: 1000}}}
figures:
  - {name: pieces, kind: line, x: elements, y: seconds.p50, series: backend, log: [x, y], caption: Smaller is slower.}
"""


def sweep(study, out, *flags):
    return main(["sweep", "--config", str(study), f"--out={out}", *flags])


def with_key(line):
    """The study with a line in place of the key that it gives."""
    key = line.partition(":")[0]
    kept, skipping = [], False
    for old in STUDY.strip().splitlines():
        skipping = old.startswith(f"{key}:") or (skipping and old.startswith(" "))
        kept += [] if skipping else [old]
    return "\n".join([*kept, line])


def shown(out):
    """The rows of the table, as text."""
    return list(csv.DictReader((out / "rows.csv").read_text().splitlines()))


def stat(pid):
    """Of a process, its state and parent first; nothing where it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def state(pid):
    return "".join(stat(pid)[:1])


def ranks_below(pid):
    """Those of the processes below a process that multiprocessing has spawned to run ranks."""
    found = set()
    for process in descendants(pid):
        with suppress(OSError):  # it ended meanwhile
            if b"spawn_main" in Path(f"/proc/{process}/cmdline").read_bytes():
                found.add(process)
    return found


def descendants(pid):
    """Processes below a process, of any generation."""
    found = {int(name): stat(name) for name in filter(str.isdigit, os.listdir("/proc"))}
    parents = {process: int(fields[1]) for process, fields in found.items() if fields}
    below, found = {pid}, set()
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= below
    return found
