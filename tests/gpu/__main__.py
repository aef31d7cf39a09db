"""`make gpu`: all that needs a GPU, in one command; what it finds lies in one folder. Nothing is downloaded or installed."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch

from .parts import GROUPS, PARTS, ROOT

LIMIT = 480  # seconds of a part
SOURCES = (".py", ".c", ".cpp", ".hpp", ".cu", ".cuh")


def run(name, out):
    """Run a part, its output in a file; its result for the summary."""
    part = PARTS[name]
    if part.missing:
        return {"part": name, "verdict": "left out", "why": part.missing, "seconds": 0.0}
    start = time.monotonic()
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            part.command(out), cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
            why = [f"exit code {code}, see {log.name}"] if code else []
        except subprocess.TimeoutExpired:
            why = [f"not done after {LIMIT} s, see {log.name}"]
        finally:
            end_group(process)
    verdict = "failed" if why else "passed"
    if not why and (why := part.misses(out)):
        verdict = "short of its goal"
    return {"part": name, "verdict": verdict, "why": why, "seconds": time.monotonic() - start}


def end_group(process):
    """End a part and all that it has started, which would keep the GPU busy during the next one."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def commit():
    """The commit of the tree, with a mark where files differ from it; empty without git."""
    try:
        asked = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def sources(root=ROOT):
    """A hash of all that a part runs, which needs no git, and which results under version control do not change."""
    folders = ("gradwire", "kernels", "compress", "ddp_core", "hooks", "experiments", "tests", "docs/benchmarks")
    files = sorted(each for folder in folders for each in (root / folder).rglob("*") if each.suffix in SOURCES)
    digests = (f"{each.relative_to(root)} {hashlib.sha256(each.read_bytes()).hexdigest()}\n" for each in files)
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def earlier(summary, now):
    """Results of an earlier call, by part, of the same sources, and of parts that ran to their end."""
    results = json.loads(summary.read_text()) if summary.exists() else []
    ended = ("passed", "short of its goal")
    return {each["part"]: each for each in results if each.get("sources") == now and each["verdict"] in ended}


def main():
    """Run the parts that are asked for, as far as they can run here; of all, and of a group, those that did not end
    before, with these sources.

    1 where one failed, else 2 where there is no GPU, else 0, also where goals were missed.
    """
    parser = argparse.ArgumentParser(prog="tests.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join([*GROUPS, *PARTS])}; all if not given")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in {*GROUPS, *PARTS}]:
        parser.error(f"no part is called {unknown[0]}; there are: {', '.join([*GROUPS, *PARTS])}")
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device here: most of `make gpu` needs one", file=sys.stderr)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    summary, now = out / "summary.json", sources()
    results = earlier(summary, now)
    asked = [GROUPS.get(each, (each,)) for each in options.parts or PARTS]
    for name in chain.from_iterable(asked):
        if name in results and name not in options.parts:
            print(f"{name:16} {results[name]['verdict']:18} before, with these sources", flush=True)
            continue
        result = results[name] = {**run(name, out), "commit": commit(), "sources": now}
        print(f"{name:16} {result['verdict']:18} {result['seconds']:4.0f} s  {PARTS[name].says}", flush=True)
        for line in result["why"]:
            print(f"{'':16} {line}", flush=True)
        summary.write_text(json.dumps([results[part] for part in PARTS if part in results], indent=1) + "\n")
    print(f"logs, figures and summary.json: {out}")
    if any(result["verdict"] == "failed" for result in results.values()):
        return 1
    return 0 if torch.cuda.is_available() else 2


if __name__ == "__main__":
    sys.exit(main())
