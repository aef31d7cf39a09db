import json
import statistics
from pathlib import Path

from gradwire.hooks.advice.uncertainty import LARGER, SEED, uncertainty

RESULTS = Path(__file__).parents[3] / "docs" / "results"
PER_CENT = 5  # above none: compressors worse than that are of no use to anybody


def gpt(study):
    """{compressor: its row} of the GPT on four ranks; warm-ups under one name."""
    rows = json.loads((RESULTS / study / "study.json").read_text())["rows"]
    return {
        row["compressor"].replace("=60", "=20"): row for row in rows if (row["model"], row["world_size"]) == ("gpt", 4)
    }


def test_the_figures_are_those_of_the_studies():
    short, long = gpt("quality"), gpt("quality-long")
    spreads = [row.get("excess_loss.spread") for row in short.values() if row["excess_loss"] < PER_CENT]
    assert round(statistics.median(filter(None, spreads)), 1) == SEED
    changes = [long[name]["excess_loss"] - short[name]["excess_loss"] for name in long.keys() & short.keys()]
    assert len(changes) > 5
    assert round(max(map(abs, changes)), 1) == LARGER
    assert f"{SEED} points" in uncertainty()
    assert f"{LARGER} points" in uncertainty()
