"""Installation where the native kernels cannot be built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ["gradwire", "kernels", "compress", "ddp_core", "hooks", "experiments"]
CODE = """
import torch
from gradwire import kernels
native = {backend.name: backend for backend in kernels.backends()}["native"]
out = torch.empty(2)
kernels.cast_scaled(torch.ones(2), out, 0.5)
print(kernels.__file__, native.available, native.reason, out.tolist())
"""


def test_without_a_compiler_all_else_is_installed_and_the_reason_is_told(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "PYTHONPATH": str(target)}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", target, source], env=environment, check=True)
    command = [sys.executable, "-c", CODE]
    ran = subprocess.run(command, cwd=target, env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(str(target))
    assert "False the extension is not built" in ran.stdout
    assert ran.stdout.rstrip().endswith("[0.5, 0.5]")
