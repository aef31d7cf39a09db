"""Advice: whether to compress a training's gradients, and how, from a minute of measuring."""

from .advise import advise
from .recommendation import Advice, Forecast
from .rule import Choice, Rule

__all__ = ["Advice", "Choice", "Forecast", "Rule", "advise"]
