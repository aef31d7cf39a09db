"""Runs cases by name, one a line from standard input; answers each with a line of JSON on standard output."""

import json
import os
import sys
import unittest

from . import upstream


def run(name):
    """{"outcome": passes, fails, skipped or missing, "detail"} of a case, or of a class with all its cases."""
    tests = _tests(name)
    if tests is None:
        return {"outcome": "missing", "detail": "this version of torch does not have it"}
    result = unittest.TestResult()
    tests.run(result)
    broken = [text for _, text in (*result.failures, *result.errors)]
    skipped = [reason for _, reason in result.skipped]
    outcome = "fails" if broken else "skipped" if skipped else "passes"
    return {"outcome": outcome, "detail": "\n".join(broken or skipped)}


def _tests(name):
    if hasattr(upstream.Upstream, name):
        return upstream.Upstream(name)
    kind = getattr(upstream.distributed_test, name, None)
    return kind and unittest.defaultTestLoader.loadTestsFromTestCase(kind)


def main():
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what tests print is not an answer
    for line in sys.stdin:
        print(json.dumps(run(line.strip())), file=answers, flush=True)


if __name__ == "__main__":
    main()
