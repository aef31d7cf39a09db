"""Files of the current folder are no part of gradwire, however it starts its own processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.experiments.ranks import own_command as module
from gradwire.experiments.ranks import processes
from gradwire.experiments.ranks.own_command import own_command

NAMES = ("random", "socket", "pickle", "struct", "inspect", "heapq", "decimal")


@pytest.fixture
def trapped(tmp_path, monkeypatch):
    """A current folder with modules named like Python's own, each of which leaves a note when it runs."""
    note = tmp_path / "ran"
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(note)!r}, 'a').write('{name} ')\nraise ImportError('{name}')\n"
        )
    monkeypatch.chdir(tmp_path)
    return note


def test_gradwire_started_anew_runs_no_module_of_the_current_folder(trapped):
    words = own_command("--version")
    words[2] = words[2].replace(module.CALLED, f"import {', '.join(NAMES)}; print('here')")  # as torch does, in seconds
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not trapped.exists(), trapped.read_text()
    assert (done.stdout, done.returncode) == ("here\n", 0), done.stderr


def test_the_trap_shuts_where_python_is_asked_for_the_module(trapped):
    subprocess.run([sys.executable, "-m", "gradwire", "--version"], capture_output=True, check=False)
    assert trapped.exists()


def test_a_clone_that_runs_from_its_own_folder_starts_itself(monkeypatch):
    root = Path(module.__file__).parents[2]
    monkeypatch.chdir(root)
    code = "from importlib.util import find_spec; print(find_spec('gradwire').origin)"
    words = own_command()
    words[2] = words[2].rpartition(";")[0].replace("from gradwire.__main__ import main", code)
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert Path(shown.strip()) == root / "gradwire" / "__init__.py"


def leave(rank, rendezvous, file):
    Path(file).write_text("here")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads no PYTHONSAFEPATH")
def test_ranks_run_no_module_of_the_current_folder(trapped, tmp_path, monkeypatch, quick_start):
    monkeypatch.setattr(processes.multiprocessing, "start_processes", quick_start)
    processes.run_ranks(leave, 1, str(tmp_path / "there"))
    assert not trapped.exists(), trapped.read_text()
    assert (tmp_path / "there").exists()
