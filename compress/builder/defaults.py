"""The best error feedback for an optimizer, by compressor: for options that a specification leaves open."""

from collections.abc import Mapping
from typing import Any

# {kind of optimizer: {method: {option: value}}}; what is not listed keeps the method's own default.
# Near what docs/results/quality and docs/results/loss found.
FEEDBACK: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "SGD with momentum": {
        "ternary": {"feedback": 0.8},
        "topk": {"feedback": 0.9},
        "batched-powersgd": {"feedback": 0.9},
        "acp-powersgd": {"feedback": 0.9},
    },
    "Adam": {
        "topk": {"feedback": 0.9},
    },
    "Muon": {
        "topk": {"feedback": 0.9},
    },
}
