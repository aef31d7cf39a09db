"""Tables of docs/examples.md, from the runs in docs/results/examples: python docs/benchmarks/examples_tables.py."""

import json
from math import exp
from pathlib import Path
from statistics import mean
from typing import Any

from claims.claim import loss as told

RUNS = Path(__file__).parents[1] / "results" / "examples"
TABLES = {  # a title: the file, and the settings of its rows; the first row is what others are compared with
    "LoRA": ("finetune", {"lora": True}),
    "Full fine-tuning": ("finetune", {"lora": False}),
    "AdamW": ("pretrain", {"optimizer": "adamw"}),
    "AdamW, model in 16 bits": ("pretrain16", {"optimizer": "adamw"}),
    "Muon": ("pretrain", {"optimizer": "muon"}),
    "FSDP2, AdamW": ("fsdp", {"optimizer": "adamw"}),
    "FSDP2, Muon": ("fsdp", {"optimizer": "muon"}),
}
HEAD = "| compressor | bytes per step | seeds | validation loss | perplexity per byte | loss over the first row |\n"


def runs(title: str) -> dict[str, dict[int, dict[str, Any]]]:
    """The finished runs of a table: {compressor: {seed: run}}."""
    file, settings = TABLES[title]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in (RUNS / f"{file}.jsonl").read_text("utf-8").splitlines():
        run = json.loads(line)
        if all(run[name] == value for name, value in settings.items()):
            found.setdefault(run["compressor"], {})[run["seed"]] = run
    return found


def table(title: str) -> str:
    """A table in Markdown. Differences are of runs with the same seed."""
    found = runs(title)
    first = next(iter(found))
    text = HEAD + "|---|---|---|---|---|---|\n"
    for compressor, by_seed in found.items():
        losses = {seed: run["validation_loss"] for seed, run in by_seed.items()}
        shared = [seed for seed in losses if seed in found[first]]
        others = [100 * (losses[seed] / found[first][seed]["validation_loss"] - 1) for seed in shared]
        sent = {run["sent_bytes_per_step"] for run in by_seed.values()}
        (size,) = ["-" if each is None else f"{each / 1e6:.3f} MB" for each in sent]
        loss = mean(losses.values())
        change = "-" if compressor == first else told(others)
        text += f"| `{compressor}` | {size} | {len(losses)} | {loss:.3f} | {exp(loss):.2f} | {change} |\n"
    return text


if __name__ == "__main__":
    for title in TABLES:
        print(f"## {title}\n\n{table(title)}")
