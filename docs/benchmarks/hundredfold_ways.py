"""When and how the sites of hundredfold.py average: the ways of training that it compares."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from compressor_loss import GPT

MODELS = {
    "0.14 M": GPT,
    "0.4 M": replace(GPT, width=96, layers=3, heads=3),
    "0.9 M": replace(GPT, width=128, layers=4, heads=4),
}
"""GPTs by their parameters"""


@dataclass(frozen=True)
class Way:
    """When and how sites average."""

    size: str = "0.14 M"
    """of the model, one of MODELS"""
    optimizer: str = "adamw"
    lr: float = 0.004
    """AdamW's largest learning rate"""
    muon_lr: float = 0.03
    """the same of Muon, in torch's terms"""
    start: float = 1.0
    """part of the steps, before local SGD, that averages gradients"""
    first: str = "none"
    """compressor of these gradients"""
    every: int = 16
    """least number of steps between two averages of the models"""
    growth: float = 0.0
    """the number of steps is also at least this over the square of the learning rate's part of its largest value"""
    compressor: str = "none"
    """compressor of the differences of models"""
    outer: str = "average"
    moments: str = ""
    """compressor of Adam's moments; none are averaged without one"""
    rounds: tuple[int, int] = (3, 6)
    """rounds between two averages of the first and of the second moment"""

    @property
    def changes(self) -> dict[str, Any]:
        """What differs from the default, as JSON has it."""
        default = asdict(Way())
        found = {name: value for name, value in asdict(self).items() if value != default[name]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def steps_between(self, factor: float) -> float:
        """Return the steps until the next average, at a part of the largest learning rate (arXiv 2310.14423)."""
        return max(self.every, self.growth / max(factor, 1e-6) ** 2)


LR = 0.008  # the best of none's
LOCAL = Way(start=0.0, lr=LR)
INT4, INT2 = replace(LOCAL, compressor="int4"), replace(LOCAL, compressor="int2", every=8)
ONEBIT = replace(LOCAL, compressor="onebit", every=4)
OFTEN, ONEBIT_2 = replace(INT4, every=4), replace(ONEBIT, every=2)
NESTEROV = "nesterov:lr={},momentum={}"
FITTED = "int2, fitted levels"
POWERSGD, SPARSELOCO = "powersgd:rank={},payload=int4", "sparseloco:share={},over={}"
MUON = Way(optimizer="muon", lr=LR)
WAYS = {
    **{f"none, lr {lr:g}": Way(lr=lr) for lr in (0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.032)},
    **{f"every 16, lr {lr:g}": replace(LOCAL, lr=lr) for lr in (0.001, 0.002, 0.004, 0.008, 0.016)},
    "int4 at every step": Way(lr=LR, first="int4"),
    **{f"int4 at every step, lr {lr:g}": Way(lr=lr, first="int4") for lr in (0.012, 0.016)},
    **{f"int8 at every step, lr {lr:g}": Way(lr=lr, first="int8") for lr in (0.008, 0.012)},
    **{f"PowerSGD of rank {rank} at every step, int4": Way(lr=LR, first=POWERSGD.format(rank)) for rank in (2, 4)},
    "every 16, int4": INT4,
    "every 8, int2": INT2,
    "every 4, onebit": ONEBIT,
    "every 4, int4": OFTEN,
    **{f"every 2, onebit, lr {lr:g}": replace(ONEBIT_2, lr=lr) for lr in (0.008, 0.012, 0.016, 0.032)},
    **{
        f"{name}, lr {lr:g}": replace(way, lr=lr)
        for (name, way), lr in product(
            (("every 16, int4", INT4), ("every 8, int2", INT2), ("every 4, onebit", ONEBIT), ("every 4, int4", OFTEN)),
            (0.004, 0.012, 0.016, 0.032),
        )
    },
    "every 2, PowerSGD of rank 4, int4": replace(LOCAL, compressor=POWERSGD.format(4), every=2),
    "every 8, int2, no error feedback": replace(INT2, compressor="int2:error_feedback=false"),
    **{
        f"every 16, int4, Nesterov {momentum} at rate {rate}": replace(INT4, outer=NESTEROV.format(rate, momentum))
        for rate, momentum in ((0.7, 0.6), (1.0, 0.6), (0.3, 0.9), (0.7, 0.9))
    },
    "every 8, int2, Nesterov 0.6 at rate 0.7": replace(INT2, outer=NESTEROV.format(0.7, 0.6)),
    "every 16, int4, moments uncompressed at each round": replace(INT4, moments="none", rounds=(1, 1)),
    "every 16, int4, moments int8": replace(INT4, moments="int8"),
    "every 4 at least and growing, int4": replace(INT4, every=4, growth=6.0),
    "every 2 at least and growing, int2": replace(INT2, every=2, growth=3.0),
    "every 2 at least and growing, int2, lr 0.016": replace(INT2, every=2, growth=3.0, lr=0.016),
    "every step at least and growing, onebit, lr 0.016": replace(ONEBIT, every=1, growth=1.5, lr=0.016),
    "int8 for a seventh, every 16, int4": replace(INT4, start=1 / 7, first="int8"),
    "int4 for a 28th, every 16, int2": replace(INT2, start=1 / 28, first="int4", every=16),
    "PowerSGD for a seventh, every 16, int4": replace(INT4, start=1 / 7, first=POWERSGD.format(4)),
    "PowerSGD for a seventh, every 8, int2": replace(INT2, start=1 / 7, first=POWERSGD.format(4)),
    **{
        f"SparseLoCo every {every}, mean over {over}": replace(
            LOCAL, every=every, compressor=SPARSELOCO.format(1 / 64, over)
        )
        for every, over in ((15, "senders"), (15, "sites"), (4, "senders"), (4, "sites"), (2, "senders"))
    },
    **{f"Muon, none, rate {rate}": replace(MUON, muon_lr=rate) for rate in (0.015, 0.03, 0.06)},
    **{
        f"Muon, {name}, rate {rate}, AdamW's lr {lr}": replace(
            MUON, lr=lr, muon_lr=rate, start=start, compressor=spec, every=every
        )
        for (name, start, spec, every, lr), rate in product(
            (("none", 1.0, "none", 16, 0.064), ("every 4, onebit", 0.0, "onebit", 4, 0.128)), (0.015, 0.06)
        )
    },
    **{
        f"Muon, {name}, AdamW's lr {lr}": replace(MUON, lr=lr, start=start, first=first, compressor=spec, every=every)
        for (name, start, first, spec, every), lr in product(
            (
                ("none", 1.0, "none", "none", 16),
                ("int8 at every step", 1.0, "int8", "none", 16),
                ("int4 at every step", 1.0, "int4", "none", 16),
                ("int4 and a core at every step", 1.0, "int4:core=4", "none", 16),
                ("every 16, int4", 0.0, "none", "int4", 16),
                ("every 4, int4", 0.0, "none", "int4", 4),
                ("every 8, int2", 0.0, "none", "int2", 8),
                (f"every 8, {FITTED}", 0.0, "none", FITTED, 8),
                ("every 4, onebit", 0.0, "none", "onebit", 4),
                ("every 2, onebit", 0.0, "none", "onebit", 2),
            ),
            (0.016, 0.032, 0.064, 0.128, 0.256),
        )
    },
    "Muon, int4 at every step": replace(MUON, first="int4"),
    **{
        f"Muon, PowerSGD of rank {rank} at every step, int4": replace(MUON, first=POWERSGD.format(rank))
        for rank in (2, 4)
    },
    **{
        f"Muon, every {every}, {spec}, rate {rate}": replace(
            MUON, start=0.0, compressor=spec, every=every, muon_lr=rate
        )
        for (every, spec), rate in product(((16, "int4"), (8, "int2"), (4, "onebit")), (0.015, 0.06))
    },
    **{
        f"Muon, {name}{after}": replace(MUON, start=0.0, compressor=spec, every=every, outer=step)
        for (name, spec, every), (after, step) in product(
            (("every 16, int4", "int4", 16), ("every 8, int2", "int2", 8), ("every 4, onebit", "onebit", 4)),
            (("", "average"), (", Nesterov 0.6 at rate 0.7", NESTEROV.format(0.7, 0.6))),
        )
    },
}
WAYS |= {
    f"{size}: {name}": replace(WAYS[name], size=size)
    for size, name in product(
        list(MODELS)[1:],
        (
            *(f"none, lr {lr:g}" for lr in (0.004, 0.008, 0.012, 0.016)),
            "int4 at every step",
            "int4 at every step, lr 0.012",
            "int8 at every step, lr 0.008",
            *(f"every 8, int2, lr {lr:g}" for lr in (0.012, 0.016)),
            "every 4, onebit",
            *(f"every 4, onebit, lr {lr:g}" for lr in (0.012, 0.016, 0.032)),
            *(f"Muon, none, AdamW's lr {lr}" for lr in (0.032, 0.064, 0.128)),
            "Muon, int8 at every step, AdamW's lr 0.064",
            *(f"Muon, every 4, onebit, AdamW's lr {lr}" for lr in (0.064, 0.128, 0.256)),
        ),
    )
}
