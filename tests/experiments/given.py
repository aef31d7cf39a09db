"""Results made by hand, and sizes of models."""

import dataclasses
from itertools import accumulate

from gradwire.experiments.results import Evaluation, Results, RunResult, Seconds

VISION_PARAMETERS = {  # of torchvision's documentation
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "vgg19": 143_667_240,
}


def run_of(compressor="none", *, loss=(3.0, 2.0), held_out=2.0, accuracy=0.5, p50=0.1, sent=4000.0, warmed_up=True):
    """A run of as many steps as there are losses."""
    return RunResult(
        compressor=compressor,
        steps=len(loss),
        loss=tuple(loss),
        eval=Evaluation(loss=held_out, accuracy=accuracy),
        step_seconds={"p50": p50, "p75": 1.1 * p50, "p90": 1.2 * p50, "p95": 1.3 * p50},
        seconds=Seconds(encode=0.001, wait=0.002, decode=0.003),
        payload_bytes_per_step=int(sent),
        sent_bytes_per_step=sent,
        compression_ratio=4000 / sent if sent else 1.0,
        peak_memory_bytes=10**9,
        train_seconds=tuple(p50 * (step + 1) for step in range(len(loss))),
        parameters_digest="0" * 64,
        total_sent_bytes=sent * len(loss),
        warmed_up=warmed_up,
    )


def timed_run(compressor, seconds, *, turn_steps=1, loss=None, **options):
    """A run in turns; `seconds`: per step, of each turn. It is at its loss after one step unless `loss` says otherwise."""
    steps = [each for each in seconds for _ in range(turn_steps)]
    run = run_of(compressor, loss=loss or (2.0,) * len(steps), **options)
    return dataclasses.replace(
        run, train_seconds=tuple(accumulate(steps)), turn_steps=turn_steps, peak_memory_bytes=None
    )


def results_of(*runs, **changed):
    """A comparison of two ranks."""
    results = Results(
        world_size=2,
        backend="gloo",
        model={"name": "mlp", "parameters": 1000},
        data={"name": "digits", "source": "scikit-learn", "train_samples": 1437, "held_out_samples": 360},
        config={"steps": 2, "model": {"name": "mlp", "width": None}},
        runs=runs,
        environment={"python": "3.12", "gpus": []},
    )
    return dataclasses.replace(results, **changed)
