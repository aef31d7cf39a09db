"""Orthonormal bases and unit vectors in place of factors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..bases import normalize, orthogonalize
from ..checks import WIDE
from ..factors import Factors
from .library import NAME, library
from .matrices import beyond, packed


@orthogonalize.implement(NAME, {"p": WIDE}, unless=beyond)
def _orthogonalize(p: Tensor, factors: Factors) -> None:
    library().orthogonalize(*packed(factors), p, torch.get_num_threads())


@normalize.implement(NAME, {"q": WIDE, "previous": WIDE}, unless=beyond)
def _normalize(q: Tensor, factors: Factors, previous: Tensor | None = None) -> None:
    library().normalize(*packed(factors), q, previous, torch.get_num_threads())
