"""The traits of codecs that round at random in any case."""

from ..protocol.compressor import Traits

DRAWS = Traits(takes_16_bits=True, keeps_zeros=True, blocks=True, draws=True)
