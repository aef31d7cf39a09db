"""What `make test` leaves to `make test-rest`: variants that show nothing new, and nothing else."""

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace

from .variants import part_of

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


def test_both_parts_are_the_quick_one_and_the_rest_and_nothing_thorough():
    items = [*variants(), Item("test_b", {}, ("slow",)), Item("test_c", {}, ("thorough",))]
    quick, rest, both = (part_of(items, part) for part in ("quick", "rest", "both"))
    assert not quick & rest
    assert both == quick | rest
    assert [item.nodeid for item in rest if item.get_closest_marker("slow")] == ["test_b"]
    assert items[-1] not in both
