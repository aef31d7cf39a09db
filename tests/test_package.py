import doctest
import importlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import setuptools

import gradwire

ROOT = Path(__file__).parents[1]
FOLDERS = ["gradwire", "kernels", "compress", "ddp_core", "hooks", "experiments"]
FILES = [path.relative_to(ROOT) for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
OPTIONAL = "matplotlib sklearn jinja2 jsonargparse rich yaml wandb tensorboard torchvision triton cupy transformers"
OPTIONAL += " accelerate lightning pytorch_lightning"


def module(file):
    """The name under which a file of the tree is imported."""
    parts = file.with_suffix("").parts
    return ".".join([*(() if parts[0] == "gradwire" else ("gradwire",)), *parts]).removesuffix(".__init__")


RUNNER = """
import os, sys, torch
for code, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    if child := os.fork():
        assert not os.waitpid(child, 0)[1], code
        print("---", flush=True)
    else:
        sys.path[:] = [folder, *(place for place in sys.path if place)]
        os.chdir(folder)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
"""
OURS = "import sys; before = set(sys.modules); import gradwire; gradwire.attach, gradwire.DistributedDataParallel;"
OURS += "new = set(sys.modules) - before; print(sum(name.startswith('gradwire') for name in new),"
OURS += f"[name for name in '{OPTIONAL}'.split() if name in new])"
PLACES = "import gradwire.compress as a, gradwire.experiments.cli as b; print(a.__file__, b.__file__)"
BACKENDS = """
import torch
from gradwire import kernels
native = {backend.name: backend for backend in kernels.backends()}["native"]
out = torch.empty(2)
kernels.cast_scaled(torch.ones(2), out, 0.5)
print(native.available, native.reason, out.tolist())
"""


@pytest.fixture(scope="module")
def printed(installed):
    """What Python prints that has torch, and no more of ours: of the tree, of a clone, and of an installation."""
    source, target = installed
    jobs = [(OURS, ROOT), (PLACES, source), (PLACES + BACKENDS, target)]
    command = [sys.executable, "-c", RUNNER, *(str(each) for job in jobs for each in job)]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("---\n")


def test_import_brings_no_optional_dependency_and_few_files_of_ours(printed):
    files, _, others = printed[0].strip().partition(" ")
    assert others == "[]"
    assert int(files) <= 159


def test_the_version_is_the_project_s():
    assert f'\nversion = "{gradwire.__version__}"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_metadata_names_the_licence_by_its_spdx_expression_and_brings_its_text(installed):
    _, target = installed
    (info,) = target.glob("*.dist-info")
    metadata = (info / "METADATA").read_text("utf-8").splitlines()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(metadata)
    assert (info / "licenses" / "LICENSE").read_text("utf-8") == (ROOT / "LICENSE").read_text("utf-8")


def test_examples_in_docstrings_run():
    examples = [module(file) for file in FILES if ">>> " in (ROOT / file).read_text("utf-8")]
    assert [name for name in examples if doctest.testmod(importlib.import_module(name)).failed] == []
    assert len(examples) > 30


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with a real installation of the tree, made without a compiler, and the tree it was made from."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "target"))
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    pip = [sys.executable, "-m", "pip", "install", "--verbose", "--no-deps", "--no-index", "--no-build-isolation"]
    pip += ["--no-compile"]  # what is imported compiles itself
    done = subprocess.run(
        [*pip, "--target", target, source], env=environment, check=True, capture_output=True, text=True
    )
    assert "would be ignored" not in done.stdout + done.stderr
    return source, target


def test_an_installation_holds_every_file_under_one_name(installed):
    source, target = installed
    shipped = {path.relative_to(target / "gradwire") for path in (target / "gradwire").rglob("*.*")}
    expected = {path.relative_to(source) for folder in FOLDERS for path in (source / folder).rglob("*.*")}
    expected = {path.relative_to("gradwire") if path.parts[0] == "gradwire" else path for path in expected}
    built = (".pyc", ".so", ".cpp", ".hpp")
    assert {path for path in expected ^ shipped if path.suffix not in built} == set()
    assert {path.name for path in target.iterdir() if path.suffix != ".dist-info"} <= {"gradwire", "bin"}


def test_an_installation_without_a_compiler_is_imported_from_where_it_lies_and_tells_the_reason(installed, printed):
    _, target = installed
    files, shown = printed[2].splitlines()
    assert all(file.startswith(str(target)) for file in files.split())
    assert shown.startswith("False the extension is not built")
    assert shown.endswith("[0.5, 0.5]")


def test_a_wheel_is_not_built_without_its_native_code(installed, tmp_path):
    source, _ = installed
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "GRADWIRE_NATIVE": "required"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path]
    done = subprocess.run(build, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "/bin/false" in done.stderr


@pytest.mark.parametrize("without_gil", [0, 1])
def test_one_build_serves_all_pythons_but_those_without_a_gil(monkeypatch, without_gil):
    told, given = sysconfig.get_config_var, {}
    variables = {"Py_GIL_DISABLED": without_gil}
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: variables[name] if name in variables else told(name))
    monkeypatch.setattr(setuptools, "setup", lambda **options: given.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    assert given["options"] == ({} if without_gil else {"bdist_wheel": {"py_limited_api": "cp310"}})
    for extension in given["ext_modules"]:
        assert extension.py_limited_api == (not without_gil)
        assert extension.define_macros == ([] if without_gil else [("Py_LIMITED_API", "0x030A0000")])


def test_a_clone_is_imported_from_where_it_lies(installed, printed):
    assert all(file.startswith(str(installed[0])) for file in printed[1].split())
