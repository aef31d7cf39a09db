"""Which variants of a test run: `make test` leaves out those that show nothing new; `make test-rest` runs some of these."""

from itertools import combinations
from random import Random

INTERPRETED = 2  # variants of a test in Triton's interpreter, which is slow; all with --every-variant
REST = 1  # variants of a test that `make test-rest` runs; `make test-all` runs all


def params_of(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def by_test(items):
    """{a test: its variants}, always in the same order that says nothing."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    ordered = {name: sorted(variants, key=lambda item: item.nodeid) for name, variants in tests.items()}
    return {name: Random(name).sample(variants, len(variants)) for name, variants in ordered.items()}


def too_many_interpreted(items):
    """All but a few variants of each test in Triton's interpreter."""
    interpreted = [item for item in items if params_of(item).get("backend") == "triton" and not all_wanted(item)]
    return {item for variants in by_test(interpreted).values() for item in variants[INTERPRETED:]}


def part_of(items, part):
    """The items of a part: `quick` is what `make test` runs, `rest` what `make test-rest` runs, `both` is both."""
    items = [item for item in items if not item.get_closest_marker("thorough")]
    rest = left_to_the_rest(items)
    more = rest - too_many_of_the_rest(rest)
    return {"quick": set(items) - rest, "rest": more, "both": (set(items) - rest) | more}[part]


def left_to_the_rest(items):
    """Slow tests, and of others the variants that show nothing new: each choice of names, each other value has been seen."""
    left = {item for item in items if item.get_closest_marker("slow") or item.get_closest_marker("conformance")}
    for variants in by_test(item for item in items if item not in left and not all_wanted(item)).values():
        unseen = set().union(*map(shown, variants))
        while unseen:
            best = max(variants, key=lambda item: len(shown(item) & unseen))  # the first of those that show most
            variants.remove(best)
            unseen -= shown(best)
        left.update(variants)
    return left


def too_many_of_the_rest(items):
    """All but a few variants of each test that is left to the rest, but for tests that are there because they are slow."""
    many = [item for item in items if not (item.get_closest_marker("slow") or item.get_closest_marker("conformance"))]
    return {item for variants in by_test(many).values() for item in variants[REST:]}


def shown(item):
    """What a variant shows: each pair of its names (of backend, compressor, case), and every other value by itself.

    Where a test is marked `each_name`, or has one name, names count by themselves.
    """
    params = params_of(item)
    names = sorted((name, value) for name, value in params.items() if isinstance(value, str))
    others = {(name, id(value)) for name, value in params.items() if not isinstance(value, str)}  # variants share them
    alone = item.get_closest_marker("each_name") or len(names) == 1
    return others | (set(names if alone else combinations(names, 2)) or {()})


def all_wanted(item):
    return item.get_closest_marker("every_variant") is not None
