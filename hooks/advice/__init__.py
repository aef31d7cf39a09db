"""Advice: whether to compress a training's gradients, and how, from a minute of measuring."""

from .advice import Advice, Choice, Forecast, Rule
from .advise import advise

__all__ = ["Advice", "Choice", "Forecast", "Rule", "advise"]
