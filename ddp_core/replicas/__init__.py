"""Ranks train the same model: equal at the start, and buffers that stay equal."""
