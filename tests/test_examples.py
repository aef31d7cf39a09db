"""The scripts of docs/examples run as they say, and print what docs/frameworks.md shows."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "examples"
NEEDS = {
    "lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "elastic": "torch",
}
PROGRAMS = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
SHOWN = r"32 (synced )?steps"


def command(script):
    """What the first line of the script says how to start it."""
    first = script.read_text("utf-8").splitlines()[0]
    program, *words = shlex.split(re.search(r": ((?:torchrun|python) .*)\.\"\"\"$", first)[1])
    return [*PROGRAMS[program], *words[:-1], str(script.with_name(words[-1]))]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_an_example_runs_as_it_says(script, tmp_path):
    needed = NEEDS[script.stem.removeprefix("train_")]
    if not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command(script), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(SHOWN, done.stdout), done.stdout[-3000:]
