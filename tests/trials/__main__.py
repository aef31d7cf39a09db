"""`python -m tests.trials --seconds 600`, or `--seed 7`, `--seed overlap-7` for one: `make fuzz`."""

import argparse
import itertools
import os
import sys
import time

from ..ranks import PATIENCE, RankPool
from .kinds import KINDS
from .run import outcome


def main():
    """Run trials until the time is over, or the one that was asked for; 1 where any law did not hold."""
    parser = argparse.ArgumentParser(prog="tests.trials", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=named, help="only this one, such as 7 or overlap-7")
    parser.add_argument("--first", type=int, default=0, help="the seed to begin with")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what is tried in turn")
    parser.add_argument("--scale", type=float, default=1.0, help="of time limits, on a busy machine")
    parser.add_argument("--faults", choices=["some", "only", "none"], default="some")
    options = parser.parse_args()
    os.environ[PATIENCE] = str(options.scale)  # for the ranks, which do not run yet
    alone = options.seed is not None
    all_in_turn = ((kind, seed) for seed in itertools.count(options.first) for kind in options.kinds)
    wanted = [options.seed] if alone else all_in_turn
    pool, failures, counts, deadline = RankPool(), 0, dict.fromkeys(KINDS, 0), time.monotonic() + options.seconds
    for kind, seed in wanted:
        if not alone and time.monotonic() > deadline:
            break
        result = outcome(pool, seed, options.scale, options.faults, kind=kind, all_the_same=alone)
        if result is None:
            continue
        counts[kind], failures = counts[kind] + 1, failures + bool(result.found)
        print(result.report(whole=alone), end="", flush=True)
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    print(f"{sum(counts.values())} trials, {failures} of them failed: {told or 'none'}")
    pool.close()
    return 1 if failures else 0


def named(text):
    """(kind, seed): of "overlap-7", or of "7" alone, which is ddp's."""
    kind, _, seed = text.rpartition("-")
    if kind not in ("", *KINDS) or not seed.isdecimal():
        raise argparse.ArgumentTypeError(f"a seed is a number, or one of {', '.join(KINDS)} before it: local-7")
    return kind or "ddp", int(seed)


if __name__ == "__main__":
    sys.exit(main())
