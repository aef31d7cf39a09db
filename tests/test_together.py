"""Which tests one worker of pytest-xdist gets together."""

from pathlib import Path

import pytest

together = pytest.importorskip("tests.together", reason="pytest-xdist is not installed")
ROOT = Path(__file__).parents[1]


def test_a_folder_that_imports_a_lot_is_one_worker_s_and_other_tests_go_by_file():
    scope = object.__new__(together.ByFileOrFolder)._split_scope
    for folder in together.FOLDERS:
        files = [file.relative_to(ROOT).as_posix() for file in (ROOT / folder).glob("test_*.py")]
        assert len(files) > 1
        assert {scope(f"{file}::test_a[1]") for file in files} == {folder}
    assert scope("tests/test_together.py::test_a") == "tests/test_together.py"
