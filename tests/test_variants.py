"""What `make test` leaves to `make test-rest`: variants that show nothing new, and nothing else."""

import itertools
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from .variants import left_to_the_rest, part_of

ROOT = Path(__file__).parents[1]
BACKENDS, SPECS, SIZES = ("native", "reference"), ("topk", "onebit", "none"), (1, 70, 30_000)


@dataclass(eq=False)
class Item:
    """As much of pytest's items as is looked at."""

    nodeid: str
    params: dict = field(default_factory=dict)
    markers: tuple = ()

    @property
    def callspec(self):
        return SimpleNamespace(params=self.params)

    def get_closest_marker(self, name):
        return name if name in self.markers else None


def variants(*markers):
    choices = itertools.product(BACKENDS, SPECS, SIZES, (True, False))
    names = ("backend", "spec", "size", "view")
    return [
        Item(f"test_a[{place}]", dict(zip(names, each, strict=True)), markers) for place, each in enumerate(choices)
    ]


def kept(items):
    left = left_to_the_rest(items)
    return [item for item in items if item not in left]


def test_every_pair_of_names_and_every_other_value_occurs_and_few_more():
    chosen = [item.params for item in kept(variants())]
    assert {(each["backend"], each["spec"]) for each in chosen} == set(itertools.product(BACKENDS, SPECS))
    assert {each["size"] for each in chosen} == set(SIZES)
    assert {each["view"] for each in chosen} == {True, False}
    assert len(chosen) == len(BACKENDS) * len(SPECS)


def test_markers_leave_a_test_out_or_keep_all_of_it():
    assert kept(variants("slow")) == kept(variants("conformance")) == []
    assert len(kept(variants("every_variant"))) == len(variants())


def test_both_parts_are_the_quick_one_and_the_rest_and_nothing_thorough():
    items = [*variants(), Item("test_b", {}, ("slow",)), Item("test_c", {}, ("thorough",))]
    quick, rest, both = (part_of(items, part) for part in ("quick", "rest", "both"))
    assert not quick & rest
    assert both == quick | rest
    assert [item.nodeid for item in rest if item.get_closest_marker("slow")] == ["test_b"]
    assert items[-1] not in both


def test_a_filter_of_the_shell_hides_no_warning_of_a_script_from_tests():
    asked = {**os.environ, "PYTHONWARNINGS": "ignore"}
    code = "import os, tests.conftest; print(os.environ.get('PYTHONWARNINGS'))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=asked, capture_output=True, text=True)
    assert found.stdout == "None\n", found.stderr
