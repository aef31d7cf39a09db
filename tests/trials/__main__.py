"""`python -m tests.trials --seconds 600`, or `--seed 7` for one: `make fuzz`."""

import argparse
import itertools
import sys
import time

from ..ranks import RankPool
from .run import outcome


def main():
    """Run trials until the time is over, or the one that was asked for; 1 where any law did not hold."""
    parser = argparse.ArgumentParser(prog="tests.trials", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--scale", type=float, default=1.0, help="of time limits, on a busy machine")
    parser.add_argument("--faults", choices=["some", "only", "none"], default="some")
    options = parser.parse_args()
    seeds = itertools.count(options.first) if options.seed is None else [options.seed]
    pool, failures, count, deadline = RankPool(), 0, 0, time.monotonic() + options.seconds
    for seed in seeds:
        if options.seed is None and time.monotonic() > deadline:
            break
        result = outcome(pool, seed, options.scale, options.faults, all_the_same=options.seed is not None)
        if result is None:
            continue
        count, failures = count + 1, failures + bool(result.found)
        print(result.report(whole=options.seed is not None), end="", flush=True)
    print(f"{count} trials, {failures} of them failed")
    pool.close()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
