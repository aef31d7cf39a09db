"""The list of mutants fits the tree; `make mutants` makes them."""

import shlex
from collections import Counter

import pytest

from .changes import MUTANTS
from .mutant import ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_changes_one_line_that_is_there_and_names_tests_that_are(mutant):
    before, after = mutant.made_in(ROOT)
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 1
    compile(after, mutant.file, "exec")
    files = [part for part in shlex.split(mutant.tests) if part.startswith("tests/")]
    assert files
    assert all((ROOT / file.partition("::")[0]).exists() for file in files)


def test_no_two_mutants_are_alike():
    assert max(Counter((mutant.file, mutant.line) for mutant in MUTANTS).values()) == 1


def test_a_line_that_is_not_there_is_named():
    gone = Mutant("something is gone", "setup.py", "no such line", "pass", "tests/test_release.py")
    with pytest.raises(ValueError, match=r"setup.py has the line 'no such line' 0 times, not once: correct 'something"):
        gone.made_in(ROOT)
