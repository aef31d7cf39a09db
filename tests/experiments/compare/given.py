import json

LEFT_BEHIND = {"results.json", "loss.png", "tradeoff.png", "report.html"}


def results_in(folder):
    return json.loads((folder / "results.json").read_text())
