"""Residuals as kernels take them."""

from gradwire.kernels import Residual


def in_place(held):
    """The residual before a step and after it, the same tensor; None without one."""
    return None if held is None else Residual(held, held)
