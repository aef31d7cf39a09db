"""Commands whose ranks share a GPU: Gloo carries CUDA tensors, and every output says so."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from .parts import ROOT

MISSING = [name for name in ("rich", "jsonargparse", "yaml") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"commands need {', '.join(MISSING)}"),
]
COMPARE = """
from gradwire.experiments.compare.command import compare
from gradwire.experiments.compare.config import CompareConfig
if __name__ == "__main__":
    specs = ["none", "bf16", "powersgd:rank=4", "onebit"]
    raise SystemExit(compare(CompareConfig(backend="gloo-cuda", compressors=specs, steps=12, eval_batches=2, out=OUT)))
"""
BENCH = """
from gradwire.experiments.bench.command import bench_command
from gradwire.experiments.bench.config import BenchConfig
if __name__ == "__main__":
    settings = {"models": ["tiny"], "compressors": ["none", "topk"], "ddp": ["torch", "gradwire"], "steps": 4, "warmup": 2}
    raise SystemExit(bench_command(BenchConfig(backend="gloo-cuda", world_sizes=[2], json=OUT, **settings)))
"""


def ran(tmp_path, code, out):
    """What a command printed; it is started as a file, for its ranks to import."""
    file = tmp_path / "run.py"
    file.write_text(code.replace("OUT", repr(str(out))))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(file)], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout + done.stderr


def test_compare_trains_two_ranks_on_one_gpu(tmp_path):
    told = ran(tmp_path, COMPARE, tmp_path / "out")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["backend"], results["environment"]["device"], results["world_size"]) == ("gloo-cuda", "cuda", 2)
    assert len(results["runs"]) == 4
    assert "gloo-cuda on cuda" in told


def test_bench_measures_two_ranks_on_one_gpu(tmp_path):
    told = ran(tmp_path, BENCH, tmp_path / "bench.json")
    environment = json.loads((tmp_path / "bench.json").read_text())["environment"]
    assert environment["backend"] == "gloo-cuda"
    assert "gloo-cuda" in told
