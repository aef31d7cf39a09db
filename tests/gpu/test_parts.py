"""The parts of `make gpu`, as far as that can be told without a GPU."""

import re
import sys
from pathlib import Path

import pytest

from .parts import PARTS, ROOT


@pytest.mark.parametrize("name", PARTS)
def test_commands_name_files_that_exist(name, tmp_path):
    words = PARTS[name].command(tmp_path)
    files = [word for word in words[1:] if word.endswith(".py") and " " not in word]
    assert all((ROOT / file).exists() for file in files)
    assert words[0] == sys.executable


def test_every_test_of_a_gpu_is_in_a_part(tmp_path):
    marked = {
        file
        for file in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^pytestmark = .*mark\.gpu", file.read_text(), re.MULTILINE)
    }
    in_parts = {ROOT / word for part in PARTS.values() for word in part.command(tmp_path) if word.endswith(".py")}
    here = Path(__file__)
    without_one = {here.with_name(f"test_{name}.py") for name in ("parts", "host_reads", "quality", "shared_card")}
    assert {*marked, *ROOT.glob("tests/gpu/test_*.py")} - in_parts == without_one
