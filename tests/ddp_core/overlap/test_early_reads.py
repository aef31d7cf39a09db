"""Whose line it is that makes a step wait."""

from pathlib import Path

import pytest
import torch

import gradwire.ddp_core
from gradwire.ddp_core.overlap.early_reads import reader

ROOT = Path(gradwire.ddp_core.__file__).parents[1]


def called_from(file):
    """What is told of a call in a file."""
    names = {"reader": reader}
    exec(compile("def read():\n    return reader()\n", str(file), "exec"), names)
    return names["read"]()


@pytest.mark.parametrize("file", ["train.py", "docs/examples/train.py", "ddp_core_of_mine/train.py"])
def test_a_script_that_lies_in_a_clone_is_the_user_s(file):
    assert called_from(ROOT / file) == f"{ROOT / file}:2 in read"


@pytest.mark.parametrize("file", [ROOT / "hooks/torch_ddp.py", ROOT / "ddp_core/handle.py", torch.__file__])
def test_what_reads_for_somebody_else_is_not_named(file):
    where = called_from(file)
    assert where.startswith(f"{__file__}:")
    assert where.endswith(f" in {called_from.__name__}")
