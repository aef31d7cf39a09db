"""Compression of sharded parameters: weights that are gathered, gradients that are reduce-scattered."""
