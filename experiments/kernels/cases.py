"""The table of what is measured: a new job is one entry here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...kernels import operations
from ...kernels.dispatch import Operation
from .casting import all_finite, gather, narrow, widen
from .job import Job
from .low_rank import finish, left, normalize, orthogonalize, powersgd_round, right
from .quantization import dequantize_mean, quantize_blocks, rotate_blocks, sign_pack, sign_unpack_mean
from .selection import scatter_mean, select_largest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EVERY, WIDE = tuple(DTYPES), ("fp32",)


@dataclass(frozen=True)
class Case:
    """A job as compressors run it: its name, the dtypes that a bucket may have, how it is made, the operations in it.

    A backend has the job where it has one of the operations.
    """

    name: str
    dtypes: tuple[str, ...]
    make: Callable[[int, torch.dtype, torch.device], Job]
    parts: tuple[str, ...] = ()  # none: the operation of the same name

    @property
    def uses(self) -> tuple[str, ...]:
        """The names of the operations."""
        return self.parts or (self.name.partition(":")[0],)

    @property
    def operations(self) -> list[Operation[Any, Any]]:
        """The operations themselves."""
        return [operations()[name] for name in self.uses]


FACTORS = ("low_rank_left", "orthogonalize", "low_rank_right", "low_rank_finish", "normalize")
CASES = (
    Case("cast_scaled:to=fp16", WIDE, partial(narrow, to=torch.float16)),
    Case("cast_scaled:to=bf16", WIDE, partial(narrow, to=torch.bfloat16)),
    Case("cast_scaled:from=fp16", WIDE, partial(widen, source=torch.float16)),
    Case("cast_scaled:from=bf16", WIDE, partial(widen, source=torch.bfloat16)),
    Case("gather_scaled", EVERY, gather),
    Case("sign_pack", EVERY, sign_pack),
    Case("sign_unpack_mean:voters=2", EVERY, partial(sign_unpack_mean, voters=2)),
    Case("sign_unpack_mean:voters=4", EVERY, partial(sign_unpack_mean, voters=4)),
    Case("sign_unpack_mean:voters=8", EVERY, partial(sign_unpack_mean, voters=8)),
    Case("quantize_blocks", EVERY, quantize_blocks),
    Case("quantize_blocks:bits=4", EVERY, partial(quantize_blocks, bits=4)),
    Case("quantize_blocks:bits=2", EVERY, partial(quantize_blocks, bits=2)),
    Case("dequantize_mean:voters=4", EVERY, partial(dequantize_mean, voters=4)),
    Case("dequantize_mean:bits=4", EVERY, partial(dequantize_mean, voters=4, bits=4)),
    Case("dequantize_mean:bits=2", EVERY, partial(dequantize_mean, voters=4, bits=2)),
    Case("rotate_blocks", WIDE, rotate_blocks),
    Case("rotate_blocks:block=1024", WIDE, partial(rotate_blocks, block=1024)),
    Case("select_largest", EVERY, select_largest),
    Case("scatter_mean:voters=4", WIDE, partial(scatter_mean, voters=4)),
    Case("powersgd:rank=1", WIDE, partial(powersgd_round, rank=1), FACTORS),
    Case("powersgd:rank=4", WIDE, partial(powersgd_round, rank=4), FACTORS),
    Case("powersgd:rank=32", WIDE, partial(powersgd_round, rank=32), FACTORS),
    Case("low_rank_left:rank=4", WIDE, partial(left, rank=4)),
    Case("low_rank_right:rank=4", WIDE, partial(right, rank=4)),
    Case("low_rank_finish:rank=4", WIDE, partial(finish, rank=4)),
    Case("orthogonalize:rank=4", WIDE, partial(orthogonalize, rank=4)),
    Case("orthogonalize:rank=32", WIDE, partial(orthogonalize, rank=32)),
    Case("normalize:rank=4", WIDE, partial(normalize, rank=4)),
    Case("all_finite", EVERY, all_finite),
)


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """The cases of these names, with their variant (`powersgd:rank=4`) or without (`powersgd`: all); none means all.

    Raises ValueError for a name that is unknown.
    """
    for name in names:
        if not any(_named(case, name) for case in CASES):
            raise ValueError(f"unknown operation {name!r}; there are: {', '.join(case.name for case in CASES)}")
    return [case for case in CASES if not names or any(_named(case, name) for name in names)]


def _named(case: Case, name: str) -> bool:
    return name in (case.name, case.name.partition(":")[0])
