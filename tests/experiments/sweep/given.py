import csv

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
