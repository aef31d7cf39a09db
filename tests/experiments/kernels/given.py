import torch

from gradwire.experiments.kernels.cases import CASES

CPU = torch.device("cpu")
SIZE = 40_000
EVERY = [(case, dtype) for case in CASES for dtype in case.dtypes]


def named(name):
    return next(case for case in CASES if case.name == name)
