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
    "dcp": "torch",
}
PROGRAMS = {"torchrun": [sys.executable, "-m", "torch.distributed.run"], "python": [sys.executable]}
SHOWN = r"32 (synced )?steps"


def command(script):
    """What the first line of the script says how to start it."""
    first = script.read_text("utf-8").splitlines()[0]
    program, *words = shlex.split(re.search(r": ((?:torchrun|python) .*)\.\"\"\"$", first)[1])
    return [*PROGRAMS[program], *words[:-1], str(script.with_name(words[-1]))]


def printed(words, folder):
    """What a command prints that is run in a folder."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda script: script.stem)
def test_an_example_runs_as_it_says(script, tmp_path):
    needed = NEEDS[script.stem.removeprefix("train_")]
    if not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed")
    assert re.search(SHOWN, printed(command(script), tmp_path))


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_a_training_that_was_stopped_goes_on_with_another_number_of_ranks(tmp_path):
    words = command(FOLDER / "train_dcp.py")
    printed([*words, "16"], tmp_path)
    words[words.index("--nproc-per-node") + 1] = "3"
    assert "32 steps, of which 16 in this life, on 3 ranks" in printed(words, tmp_path)


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "kept"), [("dcp", "dcp-checkpoints"), ("elastic", "elastic-checkpoint.pt")])
def test_a_finished_training_that_is_started_again_says_so_and_how_to_start_over(name, kept, tmp_path):
    words = command(FOLDER / f"train_{name}.py")
    assert re.search(SHOWN, printed(words, tmp_path))
    assert printed(words, tmp_path) == f"already finished: delete {kept} to start over\n"
