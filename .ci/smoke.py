"""A smoke test of what is installed, run outside the tree: its version, its native code, its command, a page's script.

python smoke.py VERSION PAGE
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import gradwire
from gradwire import kernels

COMPARE = ["compare", "--model=mlp", "--data=digits", "--steps=4", "--eval-batches=1", "--threads=1"]


def main(version: str, page: str) -> None:
    """Raises where anything is missing."""
    site = sysconfig.get_path("purelib")
    assert str(gradwire.__file__).startswith(site), f"{gradwire.__file__} is not what was installed into {site}"
    assert gradwire.__version__ == version, f"installed is {gradwire.__version__}, built was {version}"
    native = {backend.name: backend for backend in kernels.backends()}["native"]
    assert native.available, native.reason
    if sys.platform == "linux":
        assert importlib.util.find_spec("gradwire.ddp_core.transport._shared_memory"), "no shared memory"
    out = torch.empty(3, dtype=torch.bfloat16)
    with kernels.use_backend("native"):
        kernels.cast_scaled(torch.ones(3), out, 0.5)
    assert out.tolist() == [0.5] * 3, out
    trains_on_two_ranks()
    assert "All is right." in printed("check", "--nproc=2")
    trains_and_resumes(Path(page))
    print(f"gradwire {version}, torch {torch.__version__}, Python {sys.version.split()[0]}: it works")


def trains_on_two_ranks() -> None:
    """By the command, with a method of every kind of collective; without pictures where matplotlib is not installed."""
    data = [] if importlib.util.find_spec("sklearn") else ["--model=gpt-0.9m", "--data=text"]
    methods = "--compressors=none,int8,powersgd:rank=1,topk:ratio=0.1"
    assert "powersgd:rank=1" in printed(*COMPARE, *data, methods, "--out=out")


def printed(*words: str) -> str:
    """Return what the command prints."""
    found = shutil.which("gradwire", path=str(Path(sys.executable).parent))
    assert found, "no command gradwire beside python"
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([found, *words], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trains_and_resumes(page: Path) -> None:
    """The whole training script of the documentation, under torchrun on two ranks; then from its own checkpoint."""
    (script,) = re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    Path("train.py").write_text(script, "utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    for printed in ("8 of them here", "0 of them here"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert printed in done.stdout, done.stdout
    assert Path("checkpoint.pt").exists()


if __name__ == "__main__":
    main(*sys.argv[1:])
