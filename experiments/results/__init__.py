"""Results: how they are kept, shown and drawn."""

from .comparison import Evaluation, Results, RunResult, Seconds

__all__ = ["Evaluation", "Results", "RunResult", "Seconds"]
