"""The scripts of docs/loops-without-ddp.md compress on two ranks, and train as many steps as they say."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire

PAGE = (Path(__file__).parents[1] / "docs" / "loops-without-ddp.md").read_text("utf-8")
SCRIPTS = dict(zip(("flat", "fsdp", "muon"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))


def run(rank, size, script):
    """What a script prints, in the group that there is."""
    printed, ends = io.StringIO(), (gradwire.init_process_group, dist.destroy_process_group)
    gradwire.init_process_group, dist.destroy_process_group = lambda: torch.device("cpu"), lambda: None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(script, "page", "exec"), {"__name__": "page"})
    finally:
        gradwire.init_process_group, dist.destroy_process_group = ends
    return printed.getvalue()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_compress_on_two_ranks(ranks, name):
    numbers = 2 * 512**2 if name == "muon" else 64 * 2048 + 2048 + 2048 * 128 + 128
    times = 2 if name == "flat" else 1  # a reduce-scatter is half of an all-reduce
    sent = 3 * times * numbers / 2 * (1 + 4 / 128) / 1e6
    for said in ranks.run(run, 2, SCRIPTS[name]):
        calls, size = re.fullmatch(r"(\d+) compressed calls sent ([\d.]+) MB\n", said).groups()
        assert int(calls) == 3
        assert float(size) == pytest.approx(sent, abs=0.051)
